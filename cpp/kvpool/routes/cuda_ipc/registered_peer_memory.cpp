#include "kvpool/routes/cuda_ipc/registered_peer_memory.h"

#include <pthread.h>

#include <chrono>
#include <exception>
#include <string>
#include <utility>

#include "kvpool/base/signals_blocked.h"
#include "kvpool/routes/write_in_parts.h"

namespace kvpool {
namespace {

// How often a waiting thread checks the clock and whether to stop.
constexpr std::chrono::milliseconds kLook{5};

enum class Stage : std::uint8_t { kIdle, kBegun, kReady, kRefused };

}  // namespace

// What the registering thread uses: it may outlive the route.
struct RegisteredPeerMemory::Shared {
  Shared(std::shared_ptr<const CudaContext> gpu, std::shared_ptr<MappedPeer> mapped)
      : context(std::move(gpu)), peer(std::move(mapped)) {}

  struct Region {
    Stage stage = Stage::kIdle;
    std::unique_ptr<RegisteredMemory> registered;
    std::optional<Error> why_refused;
  };

  bool is_to_register(std::size_t medium) const noexcept { return peer != nullptr && !peer->regions()[medium].empty(); }

  void run(std::size_t medium) noexcept {
    std::unique_ptr<RegisteredMemory> registered;
    std::optional<Error> why;
    try {
      const auto region = peer->regions()[medium];
      registered = std::make_unique<RegisteredMemory>(context, region.data(), region.size());
    } catch (const Error& error) {
      why = error;
    } catch (const std::exception& error) {
      why.emplace(ErrorCode::kOutOfMemory, error.what());
    }
    const std::lock_guard lock(mutex);
    Region& region = regions[medium];
    region.stage = why ? Stage::kRefused : Stage::kReady;
    region.registered = std::move(registered);
    region.why_refused = std::move(why);
    changed.notify_all();
  }

  const std::shared_ptr<const CudaContext> context;
  const std::shared_ptr<MappedPeer> peer;  // its mapping ends after what is registered of it
  mutable std::mutex mutex;
  std::condition_variable changed;
  MediumMap<Region> regions;
};

RegisteredPeerMemory::RegisteredPeerMemory(std::shared_ptr<const CudaContext> context, std::shared_ptr<MappedPeer> peer)
    : shared_(std::make_shared<Shared>(std::move(context), std::move(peer))) {}

RegisteredPeerMemory::~RegisteredPeerMemory() {
  for (std::size_t medium = 0; medium < registrars_.size(); ++medium) {
    std::thread& registrar = registrars_[medium];
    if (!registrar.joinable()) continue;
    bool ended = false;
    {
      const std::lock_guard lock(shared_->mutex);
      ended = shared_->regions[medium].stage != Stage::kBegun;
    }
    // One that has ended is about to let go of what this is the last to use.
    ended ? registrar.join() : registrar.detach();
  }
}

bool RegisteredPeerMemory::ready(const MediaSet& media) noexcept {
  bool all = true;
  for (std::size_t medium = 0; medium < media.size(); ++medium) {
    if (!media[medium] || !shared_->is_to_register(medium)) continue;
    try {
      all = begin(medium) && all;
    } catch (const std::exception&) {
      all = false;  // no thread; waiting writes fail
    }
  }
  return all;
}

bool RegisteredPeerMemory::is_ready(const MediaSet& media) const noexcept {
  const std::lock_guard lock(shared_->mutex);
  for (std::size_t medium = 0; medium < media.size(); ++medium) {
    if (!media[medium] || !shared_->is_to_register(medium)) continue;
    if (shared_->regions[medium].stage != Stage::kReady) return false;
  }
  return true;
}

// Whether it is there. Throws std::system_error when there is no thread to be had.
bool RegisteredPeerMemory::begin(std::size_t medium) {
  const std::lock_guard threads(mutex_);
  Stage& stage = shared_->regions[medium].stage;
  {
    const std::lock_guard lock(shared_->mutex);
    if (stage != Stage::kIdle) return stage == Stage::kReady;
    stage = Stage::kBegun;
  }
  const SignalsBlocked blocked;
  try {
    registrars_[medium] = std::thread([shared = shared_, medium] {
      pthread_setname_np(pthread_self(), "kvpool-register");
      shared->run(medium);
    });
  } catch (...) {
    const std::lock_guard lock(shared_->mutex);
    stage = Stage::kIdle;
    throw;
  }
  return false;
}

void RegisteredPeerMemory::wait(const MediaSet& media, const WriteRequest& request, const char* route,
                                const std::atomic<bool>& closed) {
  for (std::size_t medium = 0; medium < media.size(); ++medium) {
    if (!media[medium] || !shared_->is_to_register(medium)) continue;
    try {
      if (begin(medium)) continue;
    } catch (const std::exception& error) {
      throw Error(ErrorCode::kOutOfMemory, std::string("no thread to register a peer's memory: ") + error.what());
    }
    std::unique_lock lock(shared_->mutex);
    const Shared::Region& region = shared_->regions[medium];
    while (region.stage == Stage::kBegun) {
      throw_if_stopped(request, route, closed);
      shared_->changed.wait_for(lock, kLook);
    }
    if (region.why_refused) throw Error(*region.why_refused);
  }
}

bool RegisteredPeerMemory::refused(Medium medium) const noexcept {
  const std::lock_guard lock(shared_->mutex);
  return shared_->regions[medium].stage == Stage::kRefused;
}

}  // namespace kvpool
