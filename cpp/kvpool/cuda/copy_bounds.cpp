#include "kvpool/cuda/copy_bounds.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <new>
#include <vector>

#include "kvpool/base/error.h"
#include "kvpool/cuda/poll_backoff.h"
#include "kvpool/cuda/shared_memory.h"
#include "kvpool/cuda/stream.h"
#include "kvpool/cuda/stream_copier.h"
#include "kvpool/cuda/wait_word.h"

namespace kvpool {
namespace {

constexpr const char* kWhat = "how a GPU copies best cannot be measured";
constexpr std::size_t kKiB = 1024;
constexpr std::array<std::size_t, 6> kLengths{32 * kKiB, 64 * kKiB, 128 * kKiB, 256 * kKiB, 512 * kKiB, 1024 * kKiB};
// Of one copy over the bus. One of 12 GB/s takes a third of a millisecond, so that all of a way's 48 copies are below
// its limit.
constexpr std::size_t kBusBytes = 4096 * kKiB;
// Of one copy within the GPU: as much as its L2 cache holds, so that what is read comes from the memory.
constexpr std::size_t kWithinBytesMax = 128 * 1024 * kKiB;
constexpr std::size_t kWithinBytesGuess = 64 * 1024 * kKiB;  // where the driver does not say
constexpr std::int64_t kBusLimitNs = 25'000'000;
constexpr std::int64_t kWithinLimitNs = 100'000'000;

RaceRules rules_of(GpuWay way) noexcept {
  return {.lengths = kLengths,
          .tries = 4,
          .clear_percent = 5,
          .limit_ns = way == GpuWay::kWithin ? kWithinLimitNs : kBusLimitNs};
}

std::size_t bytes_of(const CudaContext& context, GpuWay way) {
  if (way != GpuWay::kWithin) return kBusBytes;
  const int cache = context.attribute(kCuDeviceL2Bytes, kWhat);
  if (cache <= 0) return kWithinBytesGuess;
  constexpr std::size_t kStep = kLengths.back();
  const std::size_t bytes = (static_cast<std::size_t>(cache) + kStep - 1) / kStep * kStep;
  return std::clamp(bytes, kBusBytes, kWithinBytesMax);
}

// Memory to copy between, on each side so much. Nobody else knows of it.
class Scratch {
 public:
  Scratch(const std::shared_ptr<const CudaContext>& context, GpuWay way)
      : context_(*context), bytes_(bytes_of(*context, way)), host_(context, kBusBytes) {
    context_.driver().require(context_.driver().mem_alloc(&device_, 2 * bytes_), "cuMemAlloc", kWhat);
  }
  ~Scratch() { context_.driver().mem_free(device_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  std::size_t bytes() const noexcept { return bytes_; }
  std::byte* host() const noexcept { return host_.data(); }
  std::byte* device(std::size_t at) const noexcept {
    return reinterpret_cast<std::byte*>(device_) + at;  // NOLINT(performance-no-int-to-ptr)
  }

 private:
  const CudaContext& context_;
  const std::size_t bytes_;
  const PinnedBuffer host_;
  CuPointer device_ = 0;
};

// One way of one GPU: a stream, and both racers.
class Track {
 public:
  Track(const std::shared_ptr<const CudaContext>& context, const cuda::KernelSet& kernels, const Scratch& scratch,
        GpuWay way)
      : way_(way),
        bytes_(scratch.bytes()),
        from_(way == GpuWay::kIn ? scratch.host() : scratch.device(0)),
        to_(way == GpuWay::kOut ? scratch.host() : scratch.device(bytes_)),
        stream_(context),
        kernel_(context, &kernels, always(), way == GpuWay::kWithin ? kLinkThreadBlocks : kBusThreadBlocks, kWhat),
        engines_(context, nullptr, {}, 0, kWhat) {}

  // False when it cannot be done; nothing is under way then. Throws kDeviceLost.
  bool copy(Racer racer, std::size_t piece_bytes) {
    const std::size_t pieces = bytes_ / piece_bytes;
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
    for (const GpuWay way : {GpuWay::kOut, GpuWay::kIn, GpuWay::kWithin}) bounds.set(way, kBusBytes);
    return bounds;
  }

  const GpuWay way_;
  const std::size_t bytes_;
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
      all = true;
      for (const GpuWay way : {GpuWay::kOut, GpuWay::kIn, GpuWay::kWithin}) {
        const Scratch scratch(context, way);
        Track track(context, kernels, scratch, way);
        const auto found = race_pieces(
            rules_of(way), clock, [&](Racer racer, std::size_t piece_bytes) { return track.copy(racer, piece_bytes); });
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
  const CopyBounds bounds = race_copies(context, kernels, PollBackoff::now_ns, &complete);
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
