#include "kvpool/pool/disk_recovery.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>
#include <vector>

#include "kvpool/base/check.h"
#include "kvpool/pool/disk_record.h"

namespace kvpool {
namespace {

constexpr std::uint32_t kNone = UINT32_MAX;

// The entries as a forest: each knows the entry of the page before it.
class Forest {
 public:
  Forest(std::span<const DiskEntry> entries, std::uint32_t page_tokens, std::uint32_t slots)
      : records_(entries.size()),
        parents_(entries.size(), kNone),
        children_(entries.size(), 0),
        order_(entries.size()) {
    std::vector<std::uint32_t> in_slot(slots, kNone);
    for (std::uint32_t i = 0; i < entries.size(); ++i) {
      records_[i] = decode_record(entries[i].meta, page_tokens);
      in_slot[entries[i].slot] = i;
    }
    // A page is written after the one before it, so its generation is later.
    std::iota(order_.begin(), order_.end(), 0U);
    std::ranges::sort(order_, {}, [&](std::uint32_t i) { return entries[i].generation; });
    for (const std::uint32_t i : order_) {
      if (!records_[i]) continue;
      const std::optional<DiskPlace>& before = records_[i]->parent;
      if (!before) continue;
      const std::uint32_t parent = before->slot < slots ? in_slot[before->slot] : kNone;
      const bool found = parent != kNone && records_[parent] && before->generation < entries[i].generation &&
                         entries[parent].generation == before->generation;
      if (!found) {
        records_[i].reset();
        continue;
      }
      parents_[i] = parent;
      ++children_[parent];
    }
  }

  bool reachable(std::uint32_t entry) const noexcept { return records_[entry].has_value(); }
  // visit(the entries of a prompt, from its first page on), for each that no other continues; the oldest first.
  template <class Visit>
  void for_each_prompt(Visit&& visit) const {
    std::vector<std::uint32_t> path;
    for (const std::uint32_t last : order_) {
      if (!reachable(last) || children_[last] > 0) continue;
      path.clear();
      for (std::uint32_t at = last; at != kNone; at = parents_[at]) path.push_back(at);
      std::ranges::reverse(path);
      visit(path);
    }
  }
  const DiskRecord& record(std::uint32_t entry) const noexcept { return *records_[entry]; }

 private:
  std::vector<std::optional<DiskRecord>> records_;  // none: nothing can reach it
  std::vector<std::uint32_t> parents_;
  std::vector<std::uint32_t> children_;
  std::vector<std::uint32_t> order_;
};

}  // namespace

std::uint32_t recover_pages(std::span<const DiskEntry> entries, std::uint32_t page_tokens, CacheBlocks& blocks,
                            PromptCache& cache, DiskCopies& copies) {
  const Forest forest(entries, page_tokens, blocks.store(Medium::kDisk).capacity());
  std::vector<Address> at(entries.size());
  for (std::uint32_t i = 0; i < entries.size(); ++i) {
    copies.set_generation(entries[i].slot, entries[i].generation);
    KVPOOL_CHECK(blocks.take_block(Medium::kDisk, entries[i].slot, BlockState::kReserved, &at[i]));
  }
  std::vector<Token> tokens;
  std::vector<Address> slots;
  std::vector<Address> canonical;
  forest.for_each_prompt([&](const std::vector<std::uint32_t>& prompt) {
    tokens.resize(prompt.size() * page_tokens);
    slots.clear();
    canonical.resize(prompt.size());
    for (std::size_t i = 0; i < prompt.size(); ++i) {
      const std::span<const std::byte> page = forest.record(prompt[i]).tokens;
      std::memcpy(tokens.data() + i * page_tokens, page.data(), page.size());
      slots.push_back(at[prompt[i]]);
    }
    cache.recover(forest.record(prompt.front()).name_space, tokens, slots, canonical);
  });
  std::uint32_t found = 0;
  for (std::uint32_t i = 0; i < entries.size(); ++i) {
    if (blocks.store(Medium::kDisk).state(entries[i].slot) == BlockState::kHistorical) {
      ++found;
      continue;
    }
    copies.erase(entries[i].slot);
    blocks.release(&at[i], 1);
  }
  return found;
}

}  // namespace kvpool
