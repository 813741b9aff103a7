#include "kvpool/peers/local_services.h"

#include <mutex>
#include <unordered_map>

#include "kvpool/peers/peer_parting.h"

namespace kvpool {
namespace {

struct Services {
  std::mutex mutex;
  std::unordered_map<std::uint64_t, PeerParting*> by_epoch;  // null: it has gone, and may write for ever
};

Services& services() {
  static auto* const instance = new Services;  // never destroyed: threads may outlive static objects
  return *instance;
}

}  // namespace

void LocalServices::add(std::uint64_t epoch, PeerParting* parting) {
  const std::lock_guard lock(services().mutex);
  services().by_epoch.emplace(epoch, parting);
}

void LocalServices::remove(std::uint64_t epoch, bool may_write) noexcept {
  const std::lock_guard lock(services().mutex);
  const auto entry = services().by_epoch.find(epoch);
  if (entry == services().by_epoch.end()) return;
  if (may_write) {
    entry->second = nullptr;
  } else {
    services().by_epoch.erase(entry);
  }
}

void LocalServices::tell_drained(std::uint64_t to, std::uint64_t from) noexcept {
  const std::lock_guard lock(services().mutex);
  const auto entry = services().by_epoch.find(to);
  if (entry != services().by_epoch.end() && entry->second != nullptr) entry->second->on_peer_drained(from);
}

bool LocalServices::may_write(std::uint64_t from, std::uint64_t to) noexcept {
  const std::lock_guard lock(services().mutex);
  const auto entry = services().by_epoch.find(from);
  return entry != services().by_epoch.end() && (entry->second == nullptr || entry->second->may_write_to(to));
}

}  // namespace kvpool
