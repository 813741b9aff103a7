// Readings that are under way, in the order in which they began: so that what they read is let go only after them.
//
// Not thread-safe.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace kvpool {

class Readings {
 public:
  // Returns its number.
  std::uint64_t begin() {
    active_.push_back(next_);
    return next_++;
  }
  void end(std::uint64_t number) noexcept { active_.erase(std::ranges::lower_bound(active_, number)); }
  bool none() const noexcept { return active_.empty(); }
  // Of the next reading. What is removed now may be read by those with lower numbers.
  std::uint64_t next() const noexcept { return next_; }
  // Whether a reading with a lower number is under way.
  bool any_before(std::uint64_t number) const noexcept { return !active_.empty() && active_.front() < number; }

 private:
  std::vector<std::uint64_t> active_;  // ascending
  std::uint64_t next_ = 0;
};

}  // namespace kvpool
