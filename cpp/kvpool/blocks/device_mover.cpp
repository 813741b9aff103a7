#include "kvpool/blocks/device_mover.h"

#include <algorithm>
#include <exception>
#include <string>

#include "kvpool/base/check.h"
#include "kvpool/base/error.h"

namespace kvpool {
namespace {

constexpr const char* kWhat = "blocks cannot be copied between the GPU and the host";
// Thread blocks of a copy over the bus: these keep half a megabyte on its way, which is what a bus of 64 GB/s needs a
// few times over. More do not make it faster, and the model needs the rest of the GPU.
constexpr std::uint32_t kThreadBlocks = 32;
constexpr std::size_t kBatchPieces = 4096;
constexpr int kBatchV1Version = 12080;
constexpr int kBatchV2Version = 13000;

CuPointer pointer(const std::byte* address) noexcept {
  return static_cast<CuPointer>(reinterpret_cast<std::uintptr_t>(address));
}

}  // namespace

DeviceMover::DeviceMover(const Arena& device, const Arena& host, const cuda::KernelSet* kernels)
    : context_(device.context()),
      kernels_(context_->attribute(kCuDeviceHostPointerOfRegistered, kWhat) != 0 ? kernels : nullptr),
      device_segments_(device.segments()),
      block_bytes_(device.block_bytes()) {
  KVPOOL_CHECK(device.on_device() && device.block_bytes() == host.block_bytes());
  KVPOOL_CHECK(host.pinned() || host.blocks() == 0);
  const CurrentContext current(*context_, kWhat);
  for (auto& lane : lanes_) lane = std::make_unique<Lane>(context_);
  const BlockStrip whole{0, 0, device.block_bytes()};
  const MediumSpan on_device{device.blocks(), device.segments()};
  const MediumSpan on_host{host.blocks(), host.segments()};
  plan_strips(on_device, on_host, std::span(&whole, 1), true, lane(TierWay::kOut).plan);
  plan_strips(on_host, on_device, std::span(&whole, 1), true, lane(TierWay::kIn).plan);
}

void DeviceMover::move(TierWay way, const Address* from, const Address* to, std::size_t n, const CallerStream& after) {
  if (n == 0) return;
  Lane& own = lane(way);
  const std::lock_guard lock(own.mutex);
  const CurrentContext current(*context_, kWhat);
  own.stream.follow(after);
  try {
    const bool launched = suits_kernel(own, from, to, n) && launch(own, from, to, n);
    if (!launched) copy(own, from, to, n);
  } catch (...) {
    // What is under way already must not write into blocks that are somebody else's by then.
    own.stream.drain(kWhat);
    throw;
  }
  own.stream.drain(kWhat);
}

bool DeviceMover::suits_kernel(const Lane& lane, const Address* from, const Address* to, std::size_t n) const noexcept {
  if (kernels_ == nullptr || kernels_refused_.load(std::memory_order_relaxed)) return false;
  std::size_t pieces = 0;
  const auto joining = static_cast<std::size_t>(std::ranges::count_if(lane.plan, &PlannedStrip::joins));
  for (std::size_t i = 0; i < n;) {
    const std::size_t run = run_length({from + i, n - i}, {to + i, n - i});
    pieces += joining + (lane.plan.size() - joining) * run;
    i += run;
  }
  return n * block_bytes_ / pieces <= kKernelPieceBytesMax;
}

// False when the GPU or its driver cannot run the kernels of this build (a driver that is older than they are, say):
// then the copy engines copy, from now on.
bool DeviceMover::launch(Lane& lane, const Address* from, const Address* to, std::size_t n) {
  std::vector<cuda::BlockPair> pairs(n);
  for (std::size_t i = 0; i < n; ++i) pairs[i] = {block_of(from[i]), block_of(to[i])};
  const cuda::CopyJob job{lane.plan, pairs};
  const cuda::LaunchOptions options{.thread_blocks_max = kThreadBlocks, .table = {}};
  const CuResult result = kernels_->copy(job, lane.stream.handle(), options);
  if (fault_of(result) == CudaFault::kUnsupported) {
    kernels_refused_.store(true, std::memory_order_relaxed);
    return false;
  }
  context_->driver().require(result, "the copy kernel", kWhat);
  return true;
}

void DeviceMover::copy(Lane& lane, const Address* from, const Address* to, std::size_t n) {
  std::vector<CopyPiece> room(std::min(kBatchPieces, n * lane.plan.size()));
  struct Call {
    DeviceMover* self;
    Lane* lane;
  } call{this, &lane};
  const auto hand_on = [](void* context, std::span<const CopyPiece> pieces) {
    const auto* bound = static_cast<Call*>(context);
    bound->self->copy_batch(*bound->lane, pieces);
    return true;
  };
  PieceBatch batch(room, hand_on, &call);
  for (std::size_t i = 0; i < n;) {
    const std::size_t run = run_length({from + i, n - i}, {to + i, n - i});
    batch.add_run(lane.plan, block_of(from[i]), block_of(to[i]), run);
    i += run;
  }
  batch.finish();
}

void DeviceMover::copy_batch(Lane& lane, std::span<const CopyPiece> pieces) {
  const CudaDriver& driver = context_->driver();
  const CuStream stream = lane.stream.handle();
  if (pieces.size() > 1 && copied_as_batch(lane, pieces)) return;
  for (const CopyPiece& piece : pieces) {
    driver.require(driver.memcpy_async(pointer(piece.dst), pointer(piece.src), piece.bytes, stream), "cuMemcpyAsync",
                   kWhat);
  }
}

// All of them by one call of the driver. False where it has none.
bool DeviceMover::copied_as_batch(Lane& lane, std::span<const CopyPiece> pieces) {
  const CudaDriver& driver = context_->driver();
  const bool has_v2 = driver.memcpy_batch_v2 != nullptr && context_->driver_version() >= kBatchV2Version;
  const bool has_v1 = driver.memcpy_batch_v1 != nullptr && context_->driver_version() >= kBatchV1Version;
  if (!(has_v1 || has_v2) || batches_refused_.load(std::memory_order_relaxed)) return false;
  std::vector<CuPointer> to(pieces.size());
  std::vector<CuPointer> from(pieces.size());
  std::vector<std::size_t> bytes(pieces.size());
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    to[i] = pointer(pieces[i].dst);
    from[i] = pointer(pieces[i].src);
    bytes[i] = pieces[i].bytes;
  }
  CuMemcpyAttributes attributes{};
  attributes.source_order = kCuSourceOrderStream;
  std::size_t first = 0;
  std::size_t failed = 0;
  const CuStream stream = lane.stream.handle();
  const CuResult result = has_v2 ? driver.memcpy_batch_v2(to.data(), from.data(), bytes.data(), pieces.size(),
                                                          &attributes, &first, 1, stream)
                                 : driver.memcpy_batch_v1(to.data(), from.data(), bytes.data(), pieces.size(),
                                                          &attributes, &first, 1, &failed, stream);
  if (result == kCudaNotSupported) {
    batches_refused_.store(true, std::memory_order_relaxed);
    return false;
  }
  driver.require(result, "cuMemcpyBatchAsync", kWhat);
  return true;
}

void DeviceMover::zero(const Address* blocks, std::size_t n) {
  constexpr const char* kZeroing = "blocks of the GPU cannot be zeroed";
  if (n == 0) return;
  Lane& own = lane(TierWay::kIn);
  const std::lock_guard lock(own.mutex);
  const CurrentContext current(*context_, kZeroing);
  own.stream.follow(std::nullopt);
  const CudaDriver& driver = context_->driver();
  try {
    for (std::size_t i = 0; i < n; ++i) {
      for (const Segment& segment : device_segments_) {
        driver.require(driver.memset_async(pointer(segment.base + block_of(blocks[i]) * segment.stride), 0,
                                           segment.bytes, own.stream.handle()),
                       "cuMemsetD8Async", kZeroing);
      }
    }
  } catch (...) {
    own.stream.drain(kZeroing);
    throw;
  }
  own.stream.drain(kZeroing);
}

}  // namespace kvpool
