#include "kvpool/pool/named_caches.h"

#include <cstddef>

#include "kvpool/base/error.h"
#include "kvpool/pool/keyed_cache.h"

namespace kvpool {
namespace {

constexpr std::size_t kNameBytesMax = 255;

std::shared_ptr<KeyedCache> open_one(const std::weak_ptr<KeyedCache>& cache) noexcept {
  std::shared_ptr<KeyedCache> there = cache.lock();
  return there == nullptr || there->closed() ? nullptr : there;
}

}  // namespace

void NamedCaches::add(std::string_view name, const std::shared_ptr<KeyedCache>& cache) {
  if (name.empty() || name.size() > kNameBytesMax) {
    throw Error(ErrorCode::kArgument,
                "the name of a keyed cache has " + std::to_string(name.size()) + " bytes, and takes 1 to " +
                    std::to_string(kNameBytesMax),
                {{"value", static_cast<std::int64_t>(name.size())}, {"maximum", std::int64_t{kNameBytesMax}}});
  }
  std::vector<std::shared_ptr<KeyedCache>> seen;  // destroyed without the lock
  const std::lock_guard lock(mutex_);
  seen.reserve(caches_.size());
  std::erase_if(caches_, [&](const auto& entry) {
    seen.push_back(open_one(entry.second));
    return seen.back() == nullptr;
  });
  for (const auto& [own, there] : caches_) {
    if (own == name) throw Error(ErrorCode::kState, "the pool has a keyed cache " + std::string(name) + " already");
  }
  caches_.emplace_back(name, cache);
}

std::shared_ptr<KeyedCache> NamedCaches::find(std::string_view name) noexcept {
  const std::lock_guard lock(mutex_);
  for (const auto& [own, there] : caches_) {
    if (own == name) return open_one(there);
  }
  return nullptr;
}

}  // namespace kvpool
