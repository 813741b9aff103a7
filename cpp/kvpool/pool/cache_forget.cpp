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
    if (blocks_.is_local(addresses[i]) && blocks_.is_gone(addresses[i])) continue;
    blocks_.check(addresses[i], i, BlockState::kHistorical);
    pages.push_back(blocks_.as_made(page_of(addresses[i])));
  }
  std::sort(pages.begin(), pages.end());
  cut_before(pages);
  std::size_t forgotten = 0;
  for (const Address page : pages) {
    if (blocks_.is_gone(page)) continue;  // with one before it in its prompt
    PromptNode* const node = node_of(page);
    if (node->payload.forgotten) continue;
    // What is forgotten is not to be there after a restart, even if it is pinned until then.
    if (copies_ != nullptr) index_.for_each_below(node, [&](const PromptNode& below) { drop_copies(below); });
    forgotten += index_.forget(node);
  }
  return forgotten;
}

// Cuts each node of these pages before the first of them that it has: what follows goes with that. REQUIRES: `pages`
// is sorted.
void PromptCache::cut_before(std::span<const Address> pages) {
  const auto named = [&](Address page) { return std::binary_search(pages.begin(), pages.end(), page); };
  for (const Address page : pages) {
    PromptNode* const node = node_of(page);
    if (node->payload.forgotten) continue;
    const Address* values = node->payload.values.get();
    // Only once for each node: afterwards its first page is named.
    const auto at = static_cast<std::uint32_t>(std::find_if(values, values + node->pages, named) - values);
    if (at > 0) index_.isolate(node, at, node->pages - at);  // the lower half keeps its identity
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

void PromptCache::check_found(std::span<const Address> addresses) const {
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    const Address address = addresses[i];
    if (store_of(address).state(block_of(address)) != BlockState::kHistorical) continue;
    if (!node_of(page_of(address))->payload.forgotten) continue;
    throw Error(ErrorCode::kStaleAddress,
                "address " + std::to_string(address) + " (position " + std::to_string(i) + "): the block was forgotten",
                {{"address", static_cast<std::int64_t>(address)}, {"position", static_cast<std::int64_t>(i)}});
  }
}

}  // namespace kvpool
