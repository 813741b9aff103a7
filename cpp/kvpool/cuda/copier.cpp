#include "kvpool/cuda/copier.h"

#include <algorithm>
#include <utility>

namespace kvpool {
namespace {

// Thread blocks of a kernel that leaves most of the GPU to the model, and still keeps a bus or a link busy.
constexpr std::uint32_t kThreadBlocks = 64;
constexpr std::size_t kBatchPieces = 4096;
constexpr std::size_t kIdleStreamsMax = 8;
constexpr int kBatchV1Version = 12080;
constexpr int kBatchV2Version = 13000;

CuPointer pointer(const std::byte* address) noexcept {
  return static_cast<CuPointer>(reinterpret_cast<std::uintptr_t>(address));
}

// Calls sink(source, target, run) for the longest runs of neighbours; without merge, for each pair.
template <class Sink>
void for_runs(std::span<const Address> from, std::span<const Address> to, bool merge, Sink&& sink) {
  for (std::size_t i = 0; i < from.size();) {
    const std::size_t run = merge ? run_length(from.subspan(i), to.subspan(i)) : 1;
    sink(block_of(from[i]), block_of(to[i]), run);
    i += run;
  }
}

std::uint64_t count_pieces(std::span<const PlannedStrip> plan, std::span<const Address> from,
                           std::span<const Address> to, bool merge) {
  const auto joining = static_cast<std::uint64_t>(std::ranges::count_if(plan, &PlannedStrip::joins));
  std::uint64_t pieces = 0;
  for_runs(from, to, merge,
           [&](auto, auto, std::size_t run) { pieces += joining + (plan.size() - joining) * std::uint64_t{run}; });
  return pieces;
}

}  // namespace

const cuda::KernelSet* kernels_for(const CudaContext& context) noexcept {
  return context.driver().library == "libcuda.so.1" ? cuda::gpu_kernels() : nullptr;
}

// A stream for one call, drained when it goes back.
class DeviceCopier::Lease {
 public:
  explicit Lease(DeviceCopier& copier) : copier_(copier), stream_(copier.take()) {}
  ~Lease() {
    // Of a device that is lost nothing is known: its streams are not used again.
    if (drained_) copier_.put_back(std::move(stream_));
  }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  CuStream handle() const noexcept { return stream_->handle(); }
  void drain() {
    stream_->drain(copier_.what_);
    drained_ = true;
  }

 private:
  DeviceCopier& copier_;
  std::unique_ptr<CudaStream> stream_;
  bool drained_ = false;
};

DeviceCopier::DeviceCopier(std::shared_ptr<const CudaContext> context, const cuda::KernelSet* kernels, const char* what)
    : context_(std::move(context)),
      kernels_(context_->attribute(kCuDeviceHostPointerOfRegistered, what) != 0 ? kernels : nullptr),
      what_(what) {}

std::unique_ptr<CudaStream> DeviceCopier::take() {
  {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      auto stream = std::move(idle_.back());
      idle_.pop_back();
      return stream;
    }
  }
  return std::make_unique<CudaStream>(context_);
}

void DeviceCopier::put_back(std::unique_ptr<CudaStream> stream) noexcept {
  const std::lock_guard lock(mutex_);
  if (idle_.capacity() == 0) {
    try {
      idle_.reserve(kIdleStreamsMax);
    } catch (const std::bad_alloc&) {
      return;
    }
  }
  if (idle_.size() < kIdleStreamsMax) idle_.push_back(std::move(stream));
}

std::uint64_t DeviceCopier::copy(std::span<const PlannedStrip> plan, std::span<const Address> from,
                                 std::span<const Address> to, bool merge) {
  if (plan.empty() || from.empty()) return 0;
  const std::uint64_t pieces = count_pieces(plan, from, to, merge);
  std::uint64_t bytes = 0;
  for (const PlannedStrip& strip : plan) bytes += std::uint64_t{strip.bytes} * from.size();
  std::vector<CopyPiece> room(std::min<std::uint64_t>(kBatchPieces, pieces));
  const CurrentContext current(*context_, what_);
  Lease lease(*this);
  try {
    const bool small = kernels_ != nullptr && bytes / pieces <= kKernelPieceBytesMax;
    if (!small || !launch(lease.handle(), plan, from, to)) {
      struct Call {
        DeviceCopier* self;
        CuStream stream;
      } call{this, lease.handle()};
      const auto hand_on = [](void* context, std::span<const CopyPiece> batch) {
        const auto* bound = static_cast<Call*>(context);
        bound->self->copy_batch(bound->stream, batch);
        return true;
      };
      PieceBatch batch(room, hand_on, &call);
      for_runs(from, to, merge, [&](std::uint32_t source, std::uint32_t target, std::size_t run) {
        batch.add_run(plan, source, target, run);
      });
      batch.finish();
    }
  } catch (...) {
    // What is under way already must not write into blocks that are somebody else's by then.
    lease.drain();
    throw;
  }
  lease.drain();
  return pieces;
}

void DeviceCopier::copy(std::span<const CopyPiece> pieces) {
  if (pieces.empty()) return;
  const CurrentContext current(*context_, what_);
  Lease lease(*this);
  try {
    for (std::size_t at = 0; at < pieces.size(); at += kBatchPieces) {
      copy_batch(lease.handle(), pieces.subspan(at, std::min(kBatchPieces, pieces.size() - at)));
    }
  } catch (...) {
    lease.drain();
    throw;
  }
  lease.drain();
}

// False when this GPU or its driver cannot run the kernels of this build: then the copy engines copy.
bool DeviceCopier::launch(CuStream stream, std::span<const PlannedStrip> plan, std::span<const Address> from,
                          std::span<const Address> to) {
  std::vector<cuda::BlockPair> pairs(from.size());
  for (std::size_t i = 0; i < from.size(); ++i) pairs[i] = {block_of(from[i]), block_of(to[i])};
  const cuda::LaunchOptions options{.thread_blocks_max = kThreadBlocks, .table = {}};
  const CuResult result = kernels_->copy({plan, pairs}, stream, options);
  if (fault_of(result) == CudaFault::kUnsupported) return false;
  context_->driver().require(result, "the copy kernel", what_);
  return true;
}

void DeviceCopier::copy_batch(CuStream stream, std::span<const CopyPiece> pieces) {
  const CudaDriver& driver = context_->driver();
  const bool has_v2 = driver.memcpy_batch_v2 != nullptr && context_->driver_version() >= kBatchV2Version;
  const bool has_v1 = driver.memcpy_batch_v1 != nullptr && context_->driver_version() >= kBatchV1Version;
  if (pieces.size() == 1 || !(has_v1 || has_v2)) {
    for (const CopyPiece& piece : pieces) {
      driver.require(driver.memcpy_async(pointer(piece.dst), pointer(piece.src), piece.bytes, stream), "cuMemcpyAsync",
                     what_);
    }
    return;
  }
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
  const CuResult result = has_v2 ? driver.memcpy_batch_v2(to.data(), from.data(), bytes.data(), pieces.size(),
                                                          &attributes, &first, 1, stream)
                                 : driver.memcpy_batch_v1(to.data(), from.data(), bytes.data(), pieces.size(),
                                                          &attributes, &first, 1, &failed, stream);
  driver.require(result, "cuMemcpyBatchAsync", what_);
}

}  // namespace kvpool
