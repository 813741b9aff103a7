// How much of one prompt each instance holds: the result of a match in a router's tree, in a form that a router can
// query in parts.
//
//   instances   4 | 1 2 7 | 3 9        longest first, then by instance
//   levels      ^   ^       ^          one for each length, longest first
//
// A router may have a thousand instances that all hold a system prompt. It asks how much a few of them hold, and which
// few hold the most; neither query visits all instances.
//
// Thread-safety: none; const calls may run at once.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvpool {

class InstanceHits {
 public:
  struct Level {
    std::size_t pages;  // of the prompt, from its start
    std::size_t begin;  // the first of them in instances()
    bool operator==(const Level&) const = default;
  };

  // The n-th level has those from levels()[n].begin to end_of(n).
  const std::vector<std::uint32_t>& instances() const noexcept { return instances_; }
  const std::vector<Level>& levels() const noexcept { return levels_; }
  std::size_t end_of(std::size_t level) const noexcept {
    return level + 1 < levels_.size() ? levels_[level + 1].begin : instances_.size();
  }

  // The level of an instance; levels().size() if it holds nothing.
  std::size_t level_of(std::uint32_t instance) const noexcept {
    const auto begin = instances_.begin();
    for (std::size_t level = 0; level < levels_.size(); ++level) {
      if (std::binary_search(begin + static_cast<std::ptrdiff_t>(levels_[level].begin),
                             begin + static_cast<std::ptrdiff_t>(end_of(level)), instance)) {
        return level;
      }
    }
    return levels_.size();
  }

  void clear() noexcept {
    instances_.clear();
    levels_.clear();
  }
  void reserve(std::size_t instances) { instances_.reserve(instances); }
  // REQUIRES: fewer pages than the last call, or equal pages and a larger instance.
  void add(std::uint32_t instance, std::size_t pages) {
    if (levels_.empty() || levels_.back().pages != pages) levels_.push_back(Level{pages, instances_.size()});
    instances_.push_back(instance);
  }

 private:
  std::vector<std::uint32_t> instances_;
  std::vector<Level> levels_;
};

}  // namespace kvpool
