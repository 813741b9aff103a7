// Copies scattered blocks on the GPU: the interface between the core, which includes no CUDA header, and the kernels in
// cuda/.
//
// Every copy of blocks is a set of strips times a set of pairs. A strip says where a part of block 0 lies on both sides
// and how far it is from one block to the next (base/strips.h); a pair says which block goes where. So the description
// of a copy grows with strips + pairs, not with their product, and one launch takes all of it:
//
//   gather      arena -> staging run   strips of plan_staging(), pairs (block, 0), (block, 1), ...
//   scatter     staging run -> arena   reverse() of them, pairs swapped
//   swap        arena -> arena         strips of plan_strips(), pairs (block, block)
//   discrete <-> aggregated, reshard   the same: plan_strips() cuts where the segments of either side end
//
// Either side may be page-locked host memory that the device maps: the kernel then reads or writes it over the bus,
// with no copy between. Under unified addressing the host's pointer is the device's.
//
// There are two sets of the same functions: for the GPU, and a reference on the CPU, with which the tests compare. Both
// check their arguments in the same way (kernel_plan.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvpool/base/segment.h"
#include "kvpool/base/strips.h"

namespace kvpool::cuda {

// A CUstream, which is a cudaStream_t. Null is the default stream of the current context.
using Stream = void*;

struct BlockPair {
  std::uint32_t from;
  std::uint32_t to;
};

// For each strip s and pair p: s.bytes bytes from s.from + p.from * s.from_stride to s.to + p.to * s.to_stride.
struct CopyJob {
  std::span<const PlannedStrip> strips;
  std::span<const BlockPair> pairs;
};

// Memory for descriptions that do not fit the arguments of a kernel (kInlineTableBytes): `host` is page-locked,
// `device` of the same length is read by the kernel. Both belong to the launch until the stream has passed it.
struct TableSpace {
  std::byte* host = nullptr;
  std::byte* device = nullptr;
  std::size_t bytes = 0;
};

struct LaunchOptions {
  // The most thread blocks of the kernel, of 256 threads; 0: as many as occupy the whole device. A few are enough for a
  // copy over the bus (docs/internals/cuda.md), and leave the rest of the device to the model.
  std::uint32_t thread_blocks_max = 0;
  // A job whose description is longer than kInlineTableBytes is one launch if this is large enough (table_bytes_of),
  // otherwise several launches in a row.
  TableSpace table = {};
};

// A description of this length travels with the launch itself: some 3,800 pairs of one strip, 3,400 of 80.
inline constexpr std::size_t kInlineTableBytes = std::size_t{31} << 10;

// The length of a description; if it exceeds kInlineTableBytes, the TableSpace must have this length.
std::size_t table_bytes_of(std::size_t strips, std::size_t pairs) noexcept;

// Functions that return a CUresult (cudaError_t has the same numbers), 0 for success: the work is then in the stream,
// or, for the reference, done. They throw kArgument before anything is launched when the job is malformed: a null
// pointer, a range beyond all memory, a strip that is empty or that writes beyond the beginning of the next block
// of the pairs. Without strips or pairs they do nothing. They read the spans before they return. After a result other
// than 0 some of the work may be in the stream.
//
// REQUIRES: the device's context is current in the calling thread and the stream is of it; what is read or written is
// reachable by the device; no byte that is written is read or written by another piece of the job (checked in debug
// builds). Thread-safe.
struct KernelSet {
  const char* name;
  int (*copy)(const CopyJob& job, Stream stream, const LaunchOptions& options);
  // The name of a result, "cudaErrorIllegalAddress" say.
  const char* (*result_name)(int result);
  // Loads all of them into the current context, where they are not there yet; a launch then loads nothing. Returns a
  // CUresult. Left to its first launch, a kernel is loaded when the whole context stands still, and so behind a stream
  // that waits for what this very launch is to bring.
  int (*load)();
};

// The set for the GPU; null in a build without a CUDA compiler. Opens libcuda with the first load or launch, not
// before.
const KernelSet* gpu_kernels() noexcept;

// The reference: runs in the calling thread at once, and ignores the stream. To keep the order of a stream, call it
// from a host function of the stream (cuLaunchHostFunc).
const KernelSet& reference_kernels() noexcept;

// The targets of this build's kernels: "sm_80 sm_90 sm_100 compute_100"; empty without kernels.
const char* kernel_targets() noexcept;

// The order of pieces in a staging run.
enum class StagingOrder : std::uint8_t {
  kByBlock,  // all ranges of the first block, then of the second: the order of aggregated blocks
  kByRange,  // the first range of all blocks, then the second: the order of ContentPlan, a layer as one message
};

// The strips that gather `ranges` of the content of `count` blocks into a run of staging memory: pair k of the job is
// {block, k}. Scatter is reverse() of them, with the pairs turned round. The run has
// count * (sum of the ranges) bytes and no gaps. REQUIRES: ranges_fit(ranges, from.block_bytes()).
std::vector<PlannedStrip> plan_staging(const MediumSpan& from, std::span<const ContentRange> ranges, std::size_t count,
                                       StagingOrder order, std::byte* staging);

// The same strips from their destinations to their sources. The caller ensures that the sources may be written.
std::vector<PlannedStrip> reverse(std::span<const PlannedStrip> strips);

}  // namespace kvpool::cuda
