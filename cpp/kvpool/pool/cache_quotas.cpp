// What the quotas of a space ask of a cache: pins that they admit, and blocks that can be dropped by their place.
#include <algorithm>

#include "kvpool/base/error.h"
#include "kvpool/pool/prompt_cache.h"

namespace kvpool {

PromptCache::Pinnable PromptCache::pinnable() const noexcept {
  Pinnable before;
  if (!blocks_.space().has_quotas()) return before;
  for (const Medium medium : kMedia) before.blocks[medium] = pinnable(medium);
  return before;
}

// Whether pins since then, on blocks that nobody had pinned, also on those on their way to DRAM, break the quotas.
bool PromptCache::overdrawn_since(const Pinnable& before, MediumMap<std::uint32_t> freed_soon) const noexcept {
  if (!blocks_.space().has_quotas()) [[likely]] {
    return false;
  }
  const bool pinned =
      std::ranges::any_of(kMedia, [&](Medium medium) { return pinnable(medium) < before.blocks[medium]; });
  return pinned && blocks_.space().overdrawn(blocks_, freed_soon);
}

// Pins make historical units active, so they are admitted like an allocation. The longest part of the hit that the
// quotas admit stays.
IndexHit PromptCache::match_within(std::string_view name_space, const Token* tokens, std::size_t n_tokens,
                                   Address* out) {
  const Pinnable before = pinnable();
  IndexHit hit;
  const auto fits = [&](std::size_t tokens_used) {
    hit = index_.match(name_space, tokens, tokens_used, out);
    return hit.pages == 0 || !overdrawn_since(before, {});
  };
  if (fits(n_tokens)) [[likely]] {
    return hit;
  }
  std::size_t most = 0;
  std::size_t too_many = hit.pages;
  index_.unpin(hit.pin);
  while (too_many - most > 1) {
    const std::size_t pages = most + (too_many - most) / 2;
    (fits(pages * index_.page_tokens()) ? most : too_many) = pages;
    index_.unpin(hit.pin);
  }
  fits(most * index_.page_tokens());
  return hit;
}

void PromptCache::check_quotas_since(const Pinnable& before, std::span<const InsertOutcome> freed) const {
  if (!blocks_.space().has_quotas()) return;
  MediumMap<std::uint32_t> freed_soon{};
  for (const InsertOutcome& outcome : freed) {
    for (const Address address : outcome.duplicates) ++freed_soon[medium_of(address)];
  }
  if (!overdrawn_since(before, freed_soon)) return;
  std::size_t pinned = 0;
  Medium medium = Medium::kHbm;
  for (const Medium each : kMedia) {
    if (before.blocks[each] <= pinnable(each)) continue;
    pinned = before.blocks[each] - pinnable(each);
    medium = each;
  }
  blocks_.space().throw_out_of_quota(blocks_, medium, pinned * blocks_.block_units(),
                                     "it would pin cached blocks that others' reserves need");
}

bool PromptCache::unused(Medium medium, std::uint32_t block) const noexcept {
  const BlockStore& blocks = store(medium);
  if (blocks.state(block) != BlockState::kHistorical || blocks.filling(block)) return false;
  if (blocks_.is_read(medium, block) || blocks.tag(block) <= CacheBlocks::kUnreadTag) return false;
  const PromptPayload& payload = node_of(blocks.address_of(block))->payload;
  return payload.pins == 0 && !payload.held && !payload.forgotten;
}

std::optional<std::uint32_t> PromptCache::droppable(Medium medium, std::uint32_t block,
                                                    std::uint32_t most) const noexcept {
  if (!unused(medium, block)) return std::nullopt;
  PromptNode* const node = node_of(store(medium).address_of(block));
  const Address* const values = node->payload.values.get();
  const Address* const found = std::find_if(values, values + node->pages, [&](Address value) {
    return medium_of(value) == medium && block_of(value) == block;
  });
  const auto from_here = static_cast<std::size_t>(values + node->pages - found);
  const std::size_t pages = from_here + index_.pages_below(node, most);
  return pages <= most ? std::optional(static_cast<std::uint32_t>(pages)) : std::nullopt;
}

void PromptCache::drop(Medium medium, std::uint32_t block) {
  const Address address = store(medium).address_of(block);
  const std::uint64_t before = dropped_blocks_;
  forget({&address, 1});
  counters_.evicted_blocks += dropped_blocks_ - before;
}

}  // namespace kvpool
