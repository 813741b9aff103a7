#include "kvpool/pool/prompt_cache.h"

#include <algorithm>
#include <string>

#include "kvpool/base/error.h"

namespace kvpool {
namespace {

// Of two addresses of this pool: one may be older than the pool's instance id.
bool same_block(Address left, Address right) noexcept { return (left ^ right) << kInstanceBits == 0; }

}  // namespace

PromptCache::PromptCache(CacheBlocks& blocks, std::uint32_t block_tokens, EvictionPolicy policy, bool audits)
    : blocks_(blocks),
      audits_(audits),
      index_(block_tokens, policy, PromptIndex::Values::kAddresses, static_cast<IndexObserver*>(this)) {
  if (blocks.space().shared()) blocks.set_cached(this);
}

PromptCache::~PromptCache() {
  if (blocks_.space().shared()) blocks_.set_cached(nullptr);
}

IndexHit PromptCache::match(std::string_view name_space, const Token* tokens, std::size_t n_tokens, Address* out) {
  const IndexHit hit = match_within(name_space, tokens, n_tokens, out);
  ++counters_.match_calls;
  counters_.requested_tokens += n_tokens;
  counters_.matched_tokens += hit.pages * index_.page_tokens();
  const auto in_dram = [](Address address) {
    return medium_bits_of(address) == static_cast<std::uint32_t>(Medium::kDram);
  };
  counters_.matched_dram_tokens +=
      static_cast<std::uint64_t>(std::count_if(out, out + hit.pages, in_dram)) * index_.page_tokens();
  if (copies_ != nullptr && hit.pages > 0) [[unlikely]] {
    const auto on_disk = std::ranges::count(out, out + hit.pages, Medium::kDisk, medium_of);
    counters_.matched_disk_tokens += static_cast<std::uint64_t>(on_disk) * index_.page_tokens();
    want(out[hit.pages - 1]);
  }
  return hit;
}

IndexHit PromptCache::match_for_peer(std::string_view name_space, const Token* tokens, std::size_t n_tokens,
                                     Address* out) {
  IndexHit hit = match_within(name_space, tokens, n_tokens, out);
  std::size_t local = 0;
  const auto readable = [&](Address address) {
    return blocks_.is_local(address) && medium_of(address) != Medium::kDisk && !blocks_.filling(address);
  };
  while (local < hit.pages && readable(out[local])) ++local;
  hit.pages = local;
  return hit;
}

// A later match would hand out what the engine has used again since, and nobody would have told.
void PromptCache::check_not_the_engines(const InsertItem& item) const {
  for (std::size_t i = 0; i < item.n_addresses; ++i) {
    const Address address = item.addresses[i];
    if (!blocks_.is_local(address) || medium_bits_of(address) != static_cast<std::uint32_t>(Medium::kHbm)) continue;
    throw Error(ErrorCode::kState,
                "address " + std::to_string(address) + " (position " + std::to_string(i) + "): HBM block " +
                    std::to_string(block_of(address)) +
                    " is the engine's, which may use it again at any moment: copy it to blocks that a pool allocates, "
                    "and insert those",
                {{"address", static_cast<std::int64_t>(address)},
                 {"position", static_cast<std::int64_t>(i)},
                 {"block", block_of(address)}});
  }
}

void PromptCache::check_insertion(std::string_view name_space, const InsertItem& item) {
  const std::size_t page = index_.page_tokens();
  if (item.n_tokens % page != 0) {
    throw Error(
        ErrorCode::kArgument,
        std::to_string(item.n_tokens) + " tokens are " + std::to_string(item.n_tokens / page) + " blocks of " +
            std::to_string(page) + " and " + std::to_string(item.n_tokens % page) + " left over: insert whole blocks",
        {{"tokens", static_cast<std::int64_t>(item.n_tokens)}, {"block_tokens", static_cast<std::int64_t>(page)}});
  }
  if (item.n_addresses != item.n_tokens / page) {
    throw Error(ErrorCode::kArgument,
                std::to_string(item.n_tokens) + " tokens need " + std::to_string(item.n_tokens / page) +
                    " addresses, and there are " + std::to_string(item.n_addresses),
                {{"needed", static_cast<std::int64_t>(item.n_tokens / page)},
                 {"given", static_cast<std::int64_t>(item.n_addresses)}});
  }
  const bool all_active = !blocks_.check_active_and_distinct(item.addresses, item.n_addresses, /*skip_cached=*/true);
  if (blocks_.engine_allocates()) check_not_the_engines(item);
  if (all_active) return;

  const std::size_t present = index_.peek(name_space, item.tokens, item.n_tokens, item.canonical).pages;
  const std::optional<std::size_t> at = first_misplaced(item, present);
  if (!at) return;
  throw Error(
      ErrorCode::kState,
      "address " + std::to_string(item.addresses[*at]) + " (position " + std::to_string(*at) +
          "): the block is cached already, as a page of another prompt or another place, or was forgotten",
      {{"address", static_cast<std::int64_t>(item.addresses[*at])}, {"position", static_cast<std::int64_t>(*at)}});
}

// Cached blocks may stand where the index has this very page: the prefix that a match gave. (An address in limbo is one
// that a match gave before its page was swapped in.) REQUIRES: item.canonical has the `present` pages of the index.
std::optional<std::size_t> PromptCache::first_misplaced(const InsertItem& item, std::size_t present) const noexcept {
  for (std::size_t i = 0; i < item.n_addresses; ++i) {
    const Address address = item.addresses[i];
    if (!blocks_.is_local(address) || store_of(address).state(block_of(address)) != BlockState::kHistorical) continue;
    const bool in_place = i < present && (same_block(item.canonical[i], address) ||
                                          store_of(address).tag(block_of(address)) == CacheBlocks::kCacheTag);
    if (!in_place) return i;
  }
  return std::nullopt;
}

std::vector<InsertOutcome> PromptCache::insert(std::string_view name_space, std::span<const InsertItem> items,
                                               bool free_duplicates, bool has_content) {
  for (const InsertItem& item : items) check_insertion(name_space, item);
  if (items.size() > 1) {
    const std::uint64_t stamp = blocks_.new_stamp();
    for (const InsertItem& item : items) blocks_.check_distinct(item.addresses, item.n_addresses, stamp);
  }

  std::vector<InsertOutcome> outcomes;
  std::vector<IndexInsertion> done;
  outcomes.reserve(items.size());
  done.reserve(items.size());
  const Pinnable before = pinnable();
  try {
    for (const InsertItem& item : items) {
      const std::size_t pages = item.n_addresses;
      const IndexInsertion insertion = index_.insert(name_space, item.tokens, pages, item.addresses, item.canonical);
      done.push_back(insertion);
      InsertOutcome& outcome = outcomes.emplace_back();
      outcome.pin = insertion.pin;
      outcome.inserted = pages - insertion.pages_present;
      for (std::size_t i = 0; i < insertion.pages_present; ++i) {
        const Address address = item.addresses[i];
        if (!blocks_.is_local(address) || same_block(address, item.canonical[i])) continue;
        if (store_of(address).state(block_of(address)) != BlockState::kActive) continue;
        if (outcome.duplicates.empty()) outcome.duplicates.reserve(insertion.pages_present - i);
        outcome.duplicates.push_back(address);
      }
    }
    check_quotas_since(before, std::span(outcomes).first(free_duplicates ? outcomes.size() : 0));
  } catch (...) {
    for (std::size_t i = done.size(); i-- > 0;) take_back(items[i], done[i]);
    throw;
  }
  for (std::size_t i = 0; i < outcomes.size(); ++i) {
    InsertOutcome& outcome = outcomes[i];
    if (copies_ != nullptr && has_content) [[unlikely]] {
      try {
        adopt(items[i], outcome.pin.node);
      } catch (const std::bad_alloc&) {
        // They stay on DISK.
      }
      std::erase_if(outcome.duplicates, [&](Address address) {
        return store_of(address).state(block_of(address)) == BlockState::kHistorical;
      });
    }
    counters_.inserted_blocks += outcome.inserted;
    counters_.duplicate_blocks += outcome.duplicates.size();
    if (copies_ != nullptr && has_content && copies_->admission() == DiskAdmission::kAlways && outcome.inserted > 0) {
      const PromptNode& last = *outcome.pin.node;
      want(last.payload.values[last.pages - 1]);
    }
    if (free_duplicates && !outcome.duplicates.empty()) {
      blocks_.release(outcome.duplicates.data(), outcome.duplicates.size());
      counters_.freed_blocks += outcome.duplicates.size();
    }
  }
  return outcomes;
}

// Pages on DISK for which an insertion gave blocks with their content lie there from now on, and their slots are
// copies. Throws std::bad_alloc, with some of them moved.
void PromptCache::adopt(const InsertItem& item, PromptNode* last) {
  if (blocks_.space().has_quotas()) return;  // the quotas were checked as if these blocks were given back
  const auto fresh = [&](std::size_t i) {
    const Address address = item.addresses[i];
    return blocks_.is_local(address) && medium_of(address) != Medium::kDisk &&
           store_of(address).state(block_of(address)) == BlockState::kActive;
  };
  std::size_t end = item.n_addresses;
  for (PromptNode* node = last; !node->is_root(); node = node->parent) {
    if (node->payload.value_class != ValueClass::kDisk) {
      end -= node->pages;
      continue;
    }
    // The node's last pages that are alike: the node is cut before them.
    const std::size_t first = end - node->pages;
    const bool given = fresh(end - 1);
    std::size_t begin = end - 1;
    while (begin > first && fresh(begin - 1) == given &&
           (!given || medium_of(item.addresses[begin - 1]) == medium_of(item.addresses[end - 1]))) {
      --begin;
    }
    if (begin > first) {
      index_.isolate(node, static_cast<std::uint32_t>(begin - first), static_cast<std::uint32_t>(end - begin));
    }
    if (given) {
      const std::vector<Address> slots(node->payload.values.get(), node->payload.values.get() + node->pages);
      index_.redirect(node, item.addresses + begin);
      placed(*node);
      for (std::size_t i = 0; i < slots.size(); ++i) {
        set_copy(item.addresses[begin + i], slot_address(block_of(slots[i])));
        item.canonical[begin + i] = item.addresses[begin + i];
      }
    }
    end = begin;
  }
}

// The caller gets back what an insertion took.
void PromptCache::take_back(const InsertItem& item, const IndexInsertion& insertion) noexcept {
  for (std::size_t i = insertion.pages_present; i < item.n_addresses; ++i) {
    const Address address = item.addresses[i];
    if (!blocks_.is_local(address)) continue;
    blocks_.set_state(address, BlockState::kActive);
    blocks_.set_tag(address, 0);
  }
  index_.undo(insertion);
}

std::size_t PromptCache::erase(std::string_view name_space, const Token* tokens, std::size_t n_tokens,
                               bool descendants) {
  const IndexErasure erasure = index_.erase(name_space, tokens, n_tokens, descendants);
  if (erasure.pages_pinned > 0) {
    throw Error(ErrorCode::kState,
                std::to_string(erasure.pages_pinned) + " of the blocks to delete are pinned: nothing was deleted",
                {{"pinned", static_cast<std::int64_t>(erasure.pages_pinned)}});
  }
  return erasure.pages;
}

// Counts what hangs below and goes too, of whatever medium.
std::size_t PromptCache::evict(Medium medium, std::size_t n) noexcept {
  const std::uint64_t before = dropped_blocks_;
  const std::size_t evicted = copies_ != nullptr && medium != Medium::kDisk ? evict_keeping_copies(medium, n)
                                                                            : index_.evict(value_class_of(medium), n);
  counters_.evicted_blocks += dropped_blocks_ - before;
  return evicted;
}

void PromptCache::explain(std::string_view name_space, const Token* tokens, std::size_t n_tokens,
                          MatchExplanation& explanation) {
  const IndexHit hit = index_.peek(name_space, tokens, n_tokens, explanation.addresses.data(), &explanation.end);
  explanation.matched_pages = hit.pages;
  explanation.partial_tokens = hit.partial_tokens;
  explanation.addresses.resize(hit.pages);
  index_.for_each_namespace(tokens, n_tokens, [&](const std::string& name, std::size_t pages) {
    if (name != name_space && pages > hit.pages) explanation.elsewhere.emplace_back(name, pages);
  });
}

void PromptCache::unpin(const IndexPin* pins, std::size_t n) noexcept {
  for (std::size_t i = 0; i < n; ++i) index_.unpin(pins[i]);
  drop_if_ended();
}

void PromptCache::end() noexcept {
  ended_ = true;
  drop_if_ended();
}

void PromptCache::drop_if_ended() noexcept {
  if (!ended_) [[likely]] {
    return;
  }
  for (const Medium medium : {Medium::kHbm, Medium::kDram}) evict(medium, SIZE_MAX);
}

void PromptCache::accept_instance(std::uint32_t instance) noexcept { index_.set_instance(instance); }

void PromptCache::set_instance(std::uint32_t instance) noexcept {
  index_.set_instance(instance);
  index_.for_each_node([&](const PromptNode& node) {
    if (node.payload.value_class == ValueClass::kRemote) return;
    for (std::uint32_t i = 0; i < node.pages; ++i) {
      node.payload.values[i] |= static_cast<Address>(instance) << kInstanceShift;
    }
  });
}

std::size_t PromptCache::possible(MediumChoice medium) const noexcept {
  std::size_t blocks = 0;
  for (const Medium tier : kMedia) {
    if (blocks_.gives(medium, tier)) blocks += blocks_.free_blocks(tier) + evictable(tier);
  }
  return blocks;
}

void PromptCache::throw_out_of_blocks(std::size_t n, MediumChoice medium) const {
  blocks_.check_open(medium);  // it may have been closed while the lock was let go of
  if (!medium.is_mixed()) blocks_.space().check_growth(blocks_, static_cast<Medium>(medium.code()), n);
  std::string text = std::to_string(n) + " blocks of " + medium.name() + " asked for";
  std::int64_t free = 0;
  std::int64_t active = 0;
  std::int64_t droppable = 0;
  std::int64_t historical = 0;
  std::int64_t displaced = 0;
  for (const Medium tier : kMedia) {
    if (!blocks_.gives(medium, tier)) continue;
    free += static_cast<std::int64_t>(blocks_.free_blocks(tier));
    active += blocks_.store(tier).count(BlockState::kActive);
    historical += blocks_.store(tier).count(BlockState::kHistorical);
    displaced += blocks_.displaced(tier);
    droppable += static_cast<std::int64_t>(evictable(tier));
  }
  const auto total = static_cast<std::int64_t>(blocks_.capacity(medium));
  text += ": of " + std::to_string(total) + ", " + std::to_string(free) + " are free, " + std::to_string(active) +
          " active, " + std::to_string(historical) + " cached (" + std::to_string(droppable) + " evictable, " +
          std::to_string(historical - droppable) + " pinned)";
  if (displaced > 0)
    text += "; other caches of the space have blocks where " + std::to_string(displaced) + " would lie";
  throw Error(ErrorCode::kOutOfBlocks, text,
              {{"requested", static_cast<std::int64_t>(n)},
               {"capacity", total},
               {"free", free},
               {"active", active},
               {"evictable", droppable},
               {"pinned", historical - droppable}});
}

void PromptCache::placed(PromptNode& node) noexcept {
  if (node.payload.value_class == ValueClass::kRemote) return;
  for (std::uint32_t i = 0; i < node.pages; ++i) {
    blocks_.set_state(node.payload.values[i], BlockState::kHistorical);
    blocks_.set_tag(node.payload.values[i], reinterpret_cast<std::uint64_t>(&node));
  }
}

void PromptCache::dropped(const Address* values, std::size_t n) noexcept {
  if (!blocks_.is_local(values[0])) return;  // values of one node are of one class
  if (copies_ != nullptr) [[unlikely]] {
    for (std::size_t i = 0; i < n; ++i) {
      if (medium_of(values[i]) == Medium::kDisk) {
        copies_->erase(block_of(values[i]));
        continue;
      }
      if (copies_->slot_of(values[i]) != DiskCopies::kNone) drop_copy(values[i]);
      page_is_gone(values[i]);
    }
  }
  dropped_blocks_ += n;
  if (node_of(values[0])->payload.forgotten) {
    for (std::size_t i = 0; i < n; ++i) blocks_.set_filling(values[i], false);  // what was never filled (A17)
  }
  blocks_.release(values, n);
}

}  // namespace kvpool
