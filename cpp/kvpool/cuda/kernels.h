// What the GPU does to blocks: it copies scattered ones. The seam between the core, which knows no CUDA header, and the
// kernels in cuda/.
//
// Everything that moves blocks is one shape of work: strips times pairs. A strip says where a part of block 0 lies on
// both sides and how far it is from one block to the next (base/strips.h); a pair says which block goes where. So the
// description of a copy grows with strips + pairs, not with their product, and one launch takes all of it:
//
//   gather      arena -> staging run   strips of plan_staging(), pairs (block, 0), (block, 1), ...
//   scatter     staging run -> arena   reverse() of them, pairs turned round
//   swap        arena -> arena         strips of plan_strips(), pairs (block, block)
//   discrete <-> aggregated, reshard   the same: plan_strips() cuts where the segments of either side end
//
// Either side may be page-locked host memory that the device maps: the kernel then reads or writes it over the bus,
// with no copy between. Under unified addressing the host's pointer is the device's.
//
// Two sets of the same functions: the GPU's, and the reference, which runs on the CPU and is what the tests compare
// with. Both check their arguments in the same way (kernel_plan.h).
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
  // Thread blocks of the kernel, of 256 threads; 0: as many as keep the whole device busy. A copy over the bus is as
  // fast with a few of them (docs/internals/cuda.md), and leaves the rest of the device to the model.
  std::uint32_t thread_blocks_max = 0;
  // A job whose description is longer than kInlineTableBytes is one launch with enough of it (table_bytes_of), several
  // launches in a row without.
  TableSpace table = {};
};

// A description of this length travels with the launch itself: some 3,800 pairs of one strip, 3,400 of 80.
inline constexpr std::size_t kInlineTableBytes = std::size_t{31} << 10;

// The length of a description: of TableSpace, when it is longer than kInlineTableBytes.
std::size_t table_bytes_of(std::size_t strips, std::size_t pairs) noexcept;

// Functions that return a CUresult (cudaError_t has the same numbers), 0 for success: the work is then in the stream,
// or, for the reference, done. They throw kArgument before anything is launched when the job is malformed: a null
// pointer, a range beyond all memory, a strip that is empty or that writes more than its stride from one block to the
// next. No strips or no pairs: nothing is done. Spans are read before the function returns. After a result other than 0
// some of the work may be in the stream.
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

// The GPU's; null where this build has no CUDA compiler. Opens libcuda when it is first asked to load or to
// launch, not before.
const KernelSet* gpu_kernels() noexcept;

// The reference: in the calling thread, at once, whatever the stream. Where a stream has to be kept in order, call it
// from a host function of the stream (cuLaunchHostFunc).
const KernelSet& reference_kernels() noexcept;

// What this build's kernels were compiled for: "sm_80 sm_90 sm_100 compute_100"; empty without kernels.
const char* kernel_targets() noexcept;

// How pieces follow each other in a staging run.
enum class StagingOrder : std::uint8_t {
  kByBlock,  // all ranges of the first block, then of the second: what one aggregated block is
  kByRange,  // the first range of all blocks, then the second: the order of ContentPlan, a layer as one message
};

// The strips that gather `ranges` of the content of `count` blocks into a run of staging memory: pair k of the job is
// {block, k}. Scatter is reverse() of them, with the pairs turned round. The run has
// count * (sum of the ranges) bytes and no gaps. REQUIRES: ranges_fit(ranges, from.block_bytes()).
std::vector<PlannedStrip> plan_staging(const MediumSpan& from, std::span<const ContentRange> ranges, std::size_t count,
                                       StagingOrder order, std::byte* staging);

// The same strips from their destinations to their sources. The caller sees to it that these may be written.
std::vector<PlannedStrip> reverse(std::span<const PlannedStrip> strips);

}  // namespace kvpool::cuda
