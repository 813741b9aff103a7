#include "kvpool/pool/local_services.h"

#include <mutex>
#include <unordered_map>

namespace kvpool {
namespace {

struct Services {
  std::mutex mutex;
  std::unordered_map<std::uint64_t, LocalService*> by_epoch;
};

Services& services() {
  static auto* const instance = new Services;  // never destroyed: threads may outlive static objects
  return *instance;
}

}  // namespace

void LocalServices::add(std::uint64_t epoch, LocalService* service) {
  const std::lock_guard lock(services().mutex);
  services().by_epoch.emplace(epoch, service);
}

void LocalServices::remove(std::uint64_t epoch) noexcept {
  const std::lock_guard lock(services().mutex);
  services().by_epoch.erase(epoch);
}

void LocalServices::tell_drained(std::uint64_t to, std::uint64_t from) noexcept {
  const std::lock_guard lock(services().mutex);
  const auto entry = services().by_epoch.find(to);
  if (entry != services().by_epoch.end()) entry->second->on_peer_drained(from);
}

bool LocalServices::may_write(std::uint64_t from, std::uint64_t to) noexcept {
  const std::lock_guard lock(services().mutex);
  const auto entry = services().by_epoch.find(from);
  return entry != services().by_epoch.end() && entry->second->may_write_to(to);
}

}  // namespace kvpool
