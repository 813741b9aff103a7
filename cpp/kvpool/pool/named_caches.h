// The keyed caches of a pool that its peers may ask, by name.
//
// Thread-safety: all of it.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvpool {

class KeyedCache;

class NamedCaches {
 public:
  // From now on, until it is closed or gone, it is found. Throws kArgument for a name that is empty or has more than
  // 255 bytes, kState for one that another open cache has.
  void add(std::string_view name, const std::shared_ptr<KeyedCache>& cache);
  // Null: no open cache has this name.
  std::shared_ptr<KeyedCache> find(std::string_view name) noexcept;

 private:
  std::mutex mutex_;
  std::vector<std::pair<std::string, std::weak_ptr<KeyedCache>>> caches_;
};

}  // namespace kvpool
