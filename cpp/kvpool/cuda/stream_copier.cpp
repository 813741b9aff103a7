#include "kvpool/cuda/stream_copier.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>
#include <utility>
#include <vector>

#include "kvpool/cuda/gpu_launch.h"

namespace kvpool {
namespace {

constexpr std::size_t kBatchPieces = 4096;
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

bool batches_are_off() {
  const char* const setting = std::getenv("KVPOOL_CUDA_BATCHES");
  return setting != nullptr && std::string_view(setting) == "0";
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

const cuda::KernelSet* kernels_for(const CudaContext& context) {
  const CudaDriver& driver = context.driver();
  const cuda::KernelSet* kernels = nullptr;
  if (driver.library == "libcuda.so.1") {
    kernels = cuda::gpu_kernels();
  } else if (driver.kernel_launcher != nullptr) {
    kernels = cuda::kernels_of(driver.kernel_launcher());
  }
  return kernels != nullptr ? loaded(context, *kernels) : nullptr;
}

const cuda::KernelSet* loaded(const CudaContext& context, const cuda::KernelSet& kernels) {
  constexpr const char* kWhat = "the copy kernels cannot be loaded";
  const CurrentContext current(context, kWhat);
  const CuResult result = kernels.load();
  const CudaFault fault = fault_of(result);
  if (fault == CudaFault::kUnsupported || fault == CudaFault::kArgument) return nullptr;
  context.driver().require(result, "cudaFuncGetAttributes", kWhat);
  return &kernels;
}

StreamCopier::StreamCopier(std::shared_ptr<const CudaContext> context, const cuda::KernelSet* kernels,
                           const CopyBounds& bounds, std::uint32_t thread_blocks, const char* what)
    : context_(std::move(context)),
      kernels_(context_->attribute(kCuDeviceHostPointerOfRegistered, what) != 0 ? kernels : nullptr),
      bounds_(bounds),
      thread_blocks_(thread_blocks),
      what_(what),
      batches_refused_(batches_are_off()) {}

std::uint64_t StreamCopier::copy(CuStream stream, GpuWay way, std::span<const PlannedStrip> plan,
                                 std::span<const Address> from, std::span<const Address> to, bool merge,
                                 CopyTable* table) {
  if (plan.empty() || from.empty()) return 0;
  const std::uint64_t pieces = count_pieces(plan, from, to, merge);
  std::uint64_t bytes = 0;
  for (const PlannedStrip& strip : plan) bytes += std::uint64_t{strip.bytes} * from.size();
  const bool small = kernels_ != nullptr && bytes / pieces <= bounds_.of(way);
  if (small && launch(stream, plan, from, to, table)) return pieces;
  std::vector<CopyPiece> room(std::min<std::uint64_t>(kBatchPieces, pieces));
  struct Call {
    StreamCopier* self;
    CuStream stream;
  } call{this, stream};
  const auto hand_on = [](void* context, std::span<const CopyPiece> batch) {
    const auto* bound = static_cast<Call*>(context);
    bound->self->copy_some(bound->stream, batch);
    return true;
  };
  PieceBatch batch(room, hand_on, &call);
  for_runs(from, to, merge, [&](std::uint32_t source, std::uint32_t target, std::size_t run) {
    batch.add_run(plan, source, target, run);
  });
  batch.finish();
  return pieces;
}

void StreamCopier::copy(CuStream stream, std::span<const CopyPiece> pieces) {
  for (std::size_t at = 0; at < pieces.size(); at += kBatchPieces) {
    copy_some(stream, pieces.subspan(at, std::min(kBatchPieces, pieces.size() - at)));
  }
}

std::size_t StreamCopier::table_bytes(std::size_t strips, std::size_t pairs) const noexcept {
  const std::size_t bytes = cuda::table_bytes_of(strips, pairs);
  return kernels_ != nullptr && bytes > cuda::kInlineTableBytes ? CopyTable::length_of(bytes) : 0;
}

// False when the GPU or its driver cannot run the kernels of this build (a driver that is older than they are, say):
// then the copy engines copy, from now on.
bool StreamCopier::launch(CuStream stream, std::span<const PlannedStrip> plan, std::span<const Address> from,
                          std::span<const Address> to, CopyTable* table) {
  if (kernels_refused_.load(std::memory_order_relaxed)) return false;
  std::vector<cuda::BlockPair> pairs(from.size());
  for (std::size_t i = 0; i < from.size(); ++i) pairs[i] = {block_of(from[i]), block_of(to[i])};
  cuda::LaunchOptions options{.thread_blocks_max = thread_blocks_, .table = {}};
  const std::size_t bytes = table_bytes(plan.size(), pairs.size());
  // Taken whatever the launch says: its copy of the table may be under way.
  if (table != nullptr && bytes > 0) options.table = table->take(bytes);
  const CuResult result = kernels_->copy({plan, pairs}, stream, options);
  if (fault_of(result) == CudaFault::kUnsupported) {
    kernels_refused_.store(true, std::memory_order_relaxed);
    return false;
  }
  context_->driver().require(result, "the copy kernel", what_);
  return true;
}

// At most kBatchPieces.
void StreamCopier::copy_some(CuStream stream, std::span<const CopyPiece> pieces) {
  if (pieces.size() > 1 && copied_as_batch(stream, pieces)) return;
  const CudaDriver& driver = context_->driver();
  for (const CopyPiece& piece : pieces) {
    driver.require(driver.memcpy_async(pointer(piece.dst), pointer(piece.src), piece.bytes, stream), "cuMemcpyAsync",
                   what_);
  }
}

// All of them by one call of the driver. False where it has none.
bool StreamCopier::copied_as_batch(CuStream stream, std::span<const CopyPiece> pieces) {
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
  const CuResult result = has_v2 ? driver.memcpy_batch_v2(to.data(), from.data(), bytes.data(), pieces.size(),
                                                          &attributes, &first, 1, stream)
                                 : driver.memcpy_batch_v1(to.data(), from.data(), bytes.data(), pieces.size(),
                                                          &attributes, &first, 1, &failed, stream);
  // A driver may refuse a batch of pieces of which it takes each by itself. A piece that is wrong is refused again.
  // Those of the batch that are under way already are copied twice, in the order of the stream.
  if (result == kCudaNotSupported || fault_of(result) == CudaFault::kArgument) {
    batches_refused_.store(true, std::memory_order_relaxed);
    return false;
  }
  driver.require(result, "cuMemcpyBatchAsync", what_);
  return true;
}

}  // namespace kvpool
