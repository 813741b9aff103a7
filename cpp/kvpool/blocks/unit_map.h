// Which units of a medium are taken: a bit for each.
//
// Thread-safety: none. Nothing allocates after construction.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

#include "kvpool/base/check.h"

namespace kvpool {

class UnitMap {
 public:
  UnitMap() = default;  // of no units
  explicit UnitMap(std::uint32_t units) : words_((units + 63) / 64) {}

  std::uint32_t taken() const noexcept { return taken_; }

  // Whether one of units [first, first + n) is taken.
  bool any(std::uint32_t first, std::uint32_t n) const noexcept {
    return for_each_word(first, n, [&](std::size_t word, std::uint64_t mask) { return (words_[word] & mask) != 0; });
  }
  bool all(std::uint32_t first, std::uint32_t n) const noexcept {
    return !for_each_word(first, n, [&](std::size_t word, std::uint64_t mask) { return (~words_[word] & mask) != 0; });
  }
  // REQUIRES: none of them is taken.
  void take(std::uint32_t first, std::uint32_t n) noexcept {
    for_each_word(first, n, [&](std::size_t word, std::uint64_t mask) {
      KVPOOL_DCHECK((words_[word] & mask) == 0);
      words_[word] |= mask;
      return false;
    });
    taken_ += n;
  }
  // REQUIRES: all of them are taken.
  void give_back(std::uint32_t first, std::uint32_t n) noexcept {
    for_each_word(first, n, [&](std::size_t word, std::uint64_t mask) {
      KVPOOL_DCHECK((words_[word] & mask) == mask);
      words_[word] &= ~mask;
      return false;
    });
    taken_ -= n;
  }
  // How many of units [first, first + n) are taken.
  std::uint32_t taken_in(std::uint32_t first, std::uint32_t n) const noexcept {
    std::uint32_t bits = 0;
    for_each_word(first, n, [&](std::size_t word, std::uint64_t mask) {
      bits += static_cast<std::uint32_t>(std::popcount(words_[word] & mask));
      return false;
    });
    return bits;
  }
  // The longest run of units [0, n) that are not taken: for an error, since it visits them all.
  std::uint32_t longest_free(std::uint32_t n) const noexcept {
    std::uint32_t longest = 0;
    std::uint32_t run = 0;
    for (std::uint32_t unit = 0; unit < n; ++unit) {
      run = (words_[unit / 64] >> (unit % 64) & 1) != 0 ? 0 : run + 1;
      if (run > longest) longest = run;
    }
    return longest;
  }
  // The number of set bits, for an audit.
  std::uint32_t count() const noexcept {
    std::uint32_t bits = 0;
    for (const std::uint64_t word : words_) bits += static_cast<std::uint32_t>(std::popcount(word));
    return bits;
  }

 private:
  // Calls visit(word, mask) for each word that contains some of these units, until visit returns true; returns whether
  // it did.
  template <class Visit>
  static bool for_each_word(std::uint32_t first, std::uint32_t n, Visit&& visit) noexcept {
    for (std::uint32_t unit = first, end = first + n; unit < end;) {
      const std::uint32_t bit = unit % 64;
      const std::uint32_t bits = end - unit < 64 - bit ? end - unit : 64 - bit;
      const std::uint64_t mask = (bits == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << bits) - 1) << bit;
      if (visit(unit / 64, mask)) return true;
      unit += bits;
    }
    return false;
  }

  std::vector<std::uint64_t> words_;
  std::uint32_t taken_ = 0;
};

}  // namespace kvpool
