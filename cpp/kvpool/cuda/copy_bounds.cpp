#include "kvpool/cuda/copy_bounds.h"

#include <map>
#include <mutex>
#include <new>
#include <vector>

#include "kvpool/base/error.h"
#include "kvpool/cuda/looks.h"
#include "kvpool/cuda/shared_memory.h"
#include "kvpool/cuda/stream.h"
#include "kvpool/cuda/stream_copier.h"
#include "kvpool/cuda/wait_word.h"

namespace kvpool {
namespace {

constexpr const char* kWhat = "how a GPU copies best cannot be measured";
constexpr std::size_t kKiB = 1024;
constexpr std::array<std::size_t, 6> kLengths{32 * kKiB, 64 * kKiB, 128 * kKiB, 256 * kKiB, 512 * kKiB, 1024 * kKiB};
// Of one copy. A bus of 12 GB/s takes a third of a millisecond, so that all of a way's 48 copies are below its limit.
constexpr std::size_t kBytes = 4096 * kKiB;
constexpr RaceRules kRules{.lengths = kLengths, .tries = 4, .clear_percent = 5, .limit_ns = 25'000'000};

// Memory to copy between. Nobody else knows of it.
class Scratch {
 public:
  explicit Scratch(const std::shared_ptr<const CudaContext>& context) : context_(*context), host_(context, kBytes) {
    context_.driver().require(context_.driver().mem_alloc(&device_, 2 * kBytes), "cuMemAlloc", kWhat);
  }
  ~Scratch() { context_.driver().mem_free(device_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  std::byte* host() const noexcept { return host_.data(); }
  std::byte* device(std::size_t at) const noexcept {
    return reinterpret_cast<std::byte*>(device_) + at;  // NOLINT(performance-no-int-to-ptr)
  }

 private:
  const CudaContext& context_;
  const PinnedBuffer host_;
  CuPointer device_ = 0;
};

// One way of one GPU: a stream, and both racers.
class Track {
 public:
  Track(const std::shared_ptr<const CudaContext>& context, const cuda::KernelSet& kernels, const Scratch& scratch,
        GpuWay way)
      : way_(way),
        from_(way == GpuWay::kIn ? scratch.host() : scratch.device(0)),
        to_(way == GpuWay::kOut ? scratch.host() : scratch.device(kBytes)),
        stream_(context),
        kernel_(context, &kernels, always(), way == GpuWay::kWithin ? kLinkThreadBlocks : kBusThreadBlocks, kWhat),
        engines_(context, nullptr, {}, 0, kWhat) {}

  // False when it cannot be done; nothing is under way then. Throws kDeviceLost.
  bool copy(Racer racer, std::size_t piece_bytes) {
    const std::size_t pieces = kBytes / piece_bytes;
    // No two neighbours on one side are neighbours in the same order on the other.
    std::vector<Address> from(pieces);
    std::vector<Address> to(pieces);
    for (std::size_t i = 0; i < pieces; ++i) {
      from[i] = make_address(0, Medium::kHbm, 0, static_cast<std::uint32_t>(i));
      to[i] = make_address(0, Medium::kHbm, 0, static_cast<std::uint32_t>(pieces - 1 - i));
    }
    const PlannedStrip strip{from_, to_, piece_bytes, piece_bytes, piece_bytes};
    bool put = true;
    try {
      (racer == Racer::kKernel ? kernel_ : engines_)
          .copy(stream_.handle(), way_, {&strip, 1}, from, to, /*merge=*/false);
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kDeviceLost) throw;
      put = false;
    }
    try {
      stream_.drain(kWhat);
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kDeviceLost) throw;
      return false;  // an error after which it has ended all the same
    }
    return put;
  }

 private:
  static CopyBounds always() noexcept {
    CopyBounds bounds;
    for (const GpuWay way : {GpuWay::kOut, GpuWay::kIn, GpuWay::kWithin}) bounds.set(way, kBytes);
    return bounds;
  }

  const GpuWay way_;
  const std::byte* const from_;
  std::byte* const to_;
  CudaStream stream_;
  StreamCopier kernel_;
  StreamCopier engines_;
};

// By the number of the GPU: a process has one driver whose kernels it runs.
struct Known {
  std::mutex race;  // one at a time: two would measure each other
  std::mutex mutex;
  std::map<int, CopyBounds> bounds;  // under mutex
};

// Never destroyed: threads may outlive static objects.
Known& known() {
  static auto* const all = new Known;
  return *all;
}

}  // namespace

CopyBounds race_copies(const std::shared_ptr<const CudaContext>& context, const cuda::KernelSet& kernels,
                       const RaceClock& clock, bool* complete) {
  CopyBounds bounds;
  bool all = false;
  try {
    // To give memory back may wait for a stream that waits for a peer: not for a measurement.
    if (!words_unset(*context)) {
      const CurrentContext current(*context, kWhat);
      const Scratch scratch(context);
      all = true;
      for (const GpuWay way : {GpuWay::kOut, GpuWay::kIn, GpuWay::kWithin}) {
        Track track(context, kernels, scratch, way);
        const auto found = race_pieces(
            kRules, clock, [&](Racer racer, std::size_t piece_bytes) { return track.copy(racer, piece_bytes); });
        if (found) bounds.set(way, *found);
        all = all && found.has_value();
      }
    }
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kDeviceLost) throw;
    all = false;
  } catch (const std::bad_alloc&) {
    all = false;
  }
  if (complete != nullptr) *complete = all;
  return bounds;
}

CopyBounds measured_copy_bounds(const std::shared_ptr<const CudaContext>& context, const cuda::KernelSet& kernels) {
  const std::lock_guard one_at_a_time(known().race);
  if (const auto found = known_copy_bounds(context->ordinal())) return *found;
  bool complete = false;
  const CopyBounds bounds = race_copies(context, kernels, Looks::now_ns, &complete);
  const std::lock_guard lock(known().mutex);
  if (complete) known().bounds.emplace(context->ordinal(), bounds);
  return bounds;
}

std::optional<CopyBounds> known_copy_bounds(int ordinal) {
  const std::lock_guard lock(known().mutex);
  const auto found = known().bounds.find(ordinal);
  if (found == known().bounds.end()) return std::nullopt;
  return found->second;
}

}  // namespace kvpool
