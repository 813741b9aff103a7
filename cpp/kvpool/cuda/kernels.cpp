#include "kvpool/cuda/kernels.h"

#include <atomic>

#include "kvpool/base/check.h"
#include "kvpool/cuda/gpu_launch.h"
#include "kvpool/cuda/kernel_plan.h"

namespace kvpool::cuda {

namespace {

struct Target {
  const Launcher& launcher;
  Stream stream;
  std::uint32_t thread_blocks_max;
};

int launch_one(void* context, const TableLaunch& launch) {
  const Target& target = *static_cast<const Target*>(context);
  return target.launcher.launch(launch, target.stream, target.thread_blocks_max);
}

// `Source` has a static launcher().
template <class Source>
int run(const CopyJob& job, Stream stream, const LaunchOptions& options) {
  Target target{Source::launcher(), stream, options.thread_blocks_max};
  return launch_job(job, options.table, launch_one, &target);
}

template <class Source>
constexpr KernelSet set_of(const char* name) {
  return {name, run<Source>, [](int result) { return Source::launcher().result_name(result); },
          [] { return Source::launcher().load(); }};
}

std::atomic<const Launcher*> named{nullptr};

struct Named {
  static const Launcher& launcher() noexcept { return *named.load(std::memory_order_acquire); }
};

}  // namespace

const KernelSet* kernels_of(const Launcher* launcher) noexcept {
  static constexpr KernelSet kSet = set_of<Named>("named");
  if (launcher == nullptr) return nullptr;
  named.store(launcher, std::memory_order_release);
  return &kSet;
}

#ifdef KVPOOL_CUDA_TARGETS
namespace {

struct OnGpu {
  static const Launcher& launcher() noexcept {
    static constexpr Launcher kLauncher{launch_on_gpu, load_on_gpu, gpu_result_name};
    return kLauncher;
  }
};

}  // namespace

const KernelSet* gpu_kernels() noexcept {
  static constexpr KernelSet kSet = set_of<OnGpu>("gpu");
  return &kSet;
}

const char* kernel_targets() noexcept { return KVPOOL_CUDA_TARGETS; }
#else
const KernelSet* gpu_kernels() noexcept { return nullptr; }

const char* kernel_targets() noexcept { return ""; }
#endif

std::size_t table_bytes_of(std::size_t strips, std::size_t pairs) noexcept { return table_bytes(strips, pairs); }

std::vector<PlannedStrip> plan_staging(const MediumSpan& from, std::span<const ContentRange> ranges, std::size_t count,
                                       StagingOrder order, std::byte* staging) {
  std::uint64_t run_bytes = 0;  // of all ranges of a block
  for (const ContentRange& range : ranges) run_bytes += range.bytes;
  std::vector<PlannedStrip> strips;
  std::uint64_t before = 0;  // bytes of the ranges before, of a block
  for (const ContentRange& range : ranges) {
    const bool by_block = order == StagingOrder::kByBlock;
    std::byte* to = staging + (by_block ? before : before * count);
    const std::size_t to_stride = static_cast<std::size_t>(by_block ? run_bytes : range.bytes);
    // Cut where segments end. What is staged is one segment, so that nothing else is cut.
    std::uint64_t segment_begin = 0;
    for (const Segment& segment : from.segments) {
      const std::uint64_t segment_end = segment_begin + segment.bytes;
      const std::uint64_t begin = std::max(range.at, segment_begin);
      const std::uint64_t end = std::min(range.at + range.bytes, segment_end);
      if (begin < end) {
        strips.push_back(PlannedStrip{segment.base + (begin - segment_begin), to + (begin - range.at),
                                      static_cast<std::size_t>(end - begin), segment.stride, to_stride});
      }
      segment_begin = segment_end;
    }
    KVPOOL_DCHECK(range.at + range.bytes <= segment_begin);
    before += range.bytes;
  }
  return strips;
}

std::vector<PlannedStrip> reverse(std::span<const PlannedStrip> strips) {
  std::vector<PlannedStrip> reversed;
  reversed.reserve(strips.size());
  for (const PlannedStrip& strip : strips) {
    reversed.push_back(
        PlannedStrip{strip.to, const_cast<std::byte*>(strip.from), strip.bytes, strip.to_stride, strip.from_stride});
  }
  return reversed;
}

}  // namespace kvpool::cuda
