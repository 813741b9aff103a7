// Cached blocks that are dropped by their addresses, pinned or not.
#include <algorithm>
#include <string>

#include "kvpool/base/error.h"
#include "kvpool/pool/prompt_cache.h"

namespace kvpool {

std::size_t PromptCache::forget(std::span<const Address> addresses) {
  std::vector<Address> pages;
  pages.reserve(addresses.size());
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    if (blocks_.is_local(addresses[i]) && blocks_.is_stale(addresses[i])) continue;
    blocks_.check(addresses[i], i, BlockState::kHistorical);
    pages.push_back(blocks_.as_made(page_of(addresses[i])));
  }
  cut_before(pages);
  std::size_t forgotten = 0;
  for (const Address page : pages) {
    if (!blocks_.is_stale(page) && !node_of(page)->payload.forgotten) forgotten += index_.forget(node_of(page));
  }
  return forgotten;
}

// Cuts nodes so that each of these pages is a node's first, unless it follows another of them in its node.
void PromptCache::cut_before(std::span<const Address> pages) {
  const PromptNode* node = nullptr;  // of the page before, which is its page `at`
  std::uint32_t at = 0;
  for (const Address page : pages) {
    PromptNode* const own = node_of(page);
    if (own->payload.forgotten) continue;
    const Address* values = own->payload.values.get();
    if (own == node && at + 1 < own->pages && values[at + 1] == page) {
      ++at;
      continue;
    }
    node = own;
    at = static_cast<std::uint32_t>(std::find(values, values + own->pages, page) - values);
    if (at > 0) index_.isolate(own, at, own->pages - at);  // the lower half keeps its identity
    at = 0;
  }
}

// A page that was forgotten can be read as long as it is pinned, but it has no place in the index to be moved to.
void PromptCache::check_not_forgotten(std::span<const Address> pages) const {
  for (std::size_t i = 0; i < pages.size(); ++i) {
    if (!node_of(page_of(pages[i]))->payload.forgotten) continue;
    throw Error(ErrorCode::kState,
                "address " + std::to_string(pages[i]) + " (position " + std::to_string(i) +
                    "): the block was forgotten: it can be read until its pins are released, and not be moved",
                {{"address", static_cast<std::int64_t>(pages[i])}, {"position", static_cast<std::int64_t>(i)}});
  }
}

}  // namespace kvpool
