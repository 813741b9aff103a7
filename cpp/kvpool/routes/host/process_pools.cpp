#include "kvpool/routes/host/process_pools.h"

#include <mutex>
#include <unordered_map>

namespace kvpool {
namespace {

struct Registry {
  std::mutex mutex;
  std::unordered_map<std::uint64_t, LocalMemory> pools;
};

Registry& registry() {
  static auto* const instance = new Registry;  // never destroyed: threads may outlive static objects
  return *instance;
}

}  // namespace

void ProcessPools::add(std::uint64_t incarnation, const LocalMemory& memory) {
  const std::lock_guard lock(registry().mutex);
  registry().pools.insert_or_assign(incarnation, memory);
}

void ProcessPools::remove(std::uint64_t incarnation) noexcept {
  std::unordered_map<std::uint64_t, LocalMemory>::node_type gone;  // its memory goes without the lock
  const std::lock_guard lock(registry().mutex);
  gone = registry().pools.extract(incarnation);
}

std::optional<LocalMemory> ProcessPools::find(std::uint64_t incarnation) {
  const std::lock_guard lock(registry().mutex);
  const auto entry = registry().pools.find(incarnation);
  if (entry == registry().pools.end()) return std::nullopt;
  return entry->second;
}

}  // namespace kvpool
