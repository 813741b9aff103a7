// Bytes that were written to a peer, by route, for monitoring: see docs/how-to/metrics.md.
//
// Thread-safety: all of it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <new>
#include <string>
#include <string_view>
#include <vector>

namespace kvpool {

struct RouteBytes {
  std::string route;
  std::uint64_t bytes = 0;
};

class SentBytes {
 public:
  // Without memory for the first bytes of a route these are not counted.
  void add(std::string_view route, std::uint64_t bytes) noexcept {
    if (bytes == 0) return;
    try {
      const std::lock_guard lock(mutex_);
      const auto known = std::ranges::find(by_route_, route, &RouteBytes::route);
      if (known == by_route_.end()) {
        by_route_.push_back({std::string(route), bytes});
      } else {
        known->bytes += bytes;
      }
    } catch (const std::bad_alloc&) {
      return;
    }
  }
  // The routes by the first use of each.
  std::vector<RouteBytes> by_route() const {
    const std::lock_guard lock(mutex_);
    return by_route_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<RouteBytes> by_route_;  // few
};

}  // namespace kvpool
