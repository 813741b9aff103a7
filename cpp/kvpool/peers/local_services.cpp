#include "kvpool/peers/local_services.h"

#include <mutex>
#include <unordered_map>

#include "kvpool/peers/peer_parting.h"

namespace kvpool {
namespace {

struct Services {
  std::mutex mutex;
  std::unordered_map<std::uint64_t, PeerParting*> by_incarnation;  // null: it has gone, and may write for ever
};

Services& services() {
  static auto* const instance = new Services;  // never destroyed: threads may outlive static objects
  return *instance;
}

}  // namespace

void LocalServices::add(std::uint64_t incarnation, PeerParting* parting) {
  const std::lock_guard lock(services().mutex);
  services().by_incarnation.emplace(incarnation, parting);
}

void LocalServices::remove(std::uint64_t incarnation, bool may_write) noexcept {
  const std::lock_guard lock(services().mutex);
  const auto entry = services().by_incarnation.find(incarnation);
  if (entry == services().by_incarnation.end()) return;
  if (may_write) {
    entry->second = nullptr;
  } else {
    services().by_incarnation.erase(entry);
  }
}

void LocalServices::tell_drained(std::uint64_t to, std::uint64_t from) noexcept {
  const std::lock_guard lock(services().mutex);
  const auto entry = services().by_incarnation.find(to);
  if (entry != services().by_incarnation.end() && entry->second != nullptr) entry->second->on_peer_drained(from);
}

bool LocalServices::may_write(std::uint64_t from, std::uint64_t to) noexcept {
  const std::lock_guard lock(services().mutex);
  const auto entry = services().by_incarnation.find(from);
  return entry != services().by_incarnation.end() && (entry->second == nullptr || entry->second->may_write_to(to));
}

}  // namespace kvpool
