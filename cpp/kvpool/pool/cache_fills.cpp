// Insertions of blocks whose content is still to come.
#include <string>
#include <utility>

#include "kvpool/base/check.h"
#include "kvpool/base/error.h"
#include "kvpool/pool/prompt_cache.h"

namespace kvpool {

InsertOutcome PromptCache::insert_unfilled(std::string_view name_space, const InsertItem& item, bool free_duplicates) {
  if (free_fills_.empty()) make_room_for_fill();
  InsertOutcome outcome = std::move(insert(name_space, {&item, 1}, free_duplicates, /*has_content=*/false).front());

  // From here on nothing throws.
  const std::uint32_t slot = free_fills_.back();
  Fill& fill = fills_[slot];
  for (std::size_t i = item.n_addresses - outcome.inserted; i < item.n_addresses; ++i) {
    const Address address = item.canonical[i];
    if (!blocks_.is_local(address)) continue;
    blocks_.set_filling(address, true);
    blocks_.set_mark(address, slot);
    ++fill.remaining;
  }
  if (fill.remaining > 0) {
    free_fills_.pop_back();
    fill.pin = index_.pin(outcome.pin.node);
  }
  return outcome;
}

void PromptCache::make_room_for_fill() {
  free_fills_.reserve(fills_.size() + 1);
  fills_.emplace_back();
  free_fills_.push_back(static_cast<std::uint32_t>(fills_.size() - 1));
}

void PromptCache::filled(std::span<const Address> addresses) {
  std::size_t ended = 0;
  try {
    for (; ended < addresses.size(); ++ended) {
      const Address address = addresses[ended];
      blocks_.check(address, ended, BlockState::kHistorical);
      if (!blocks_.filling(address) || blocks_.never_filled(address)) {
        throw Error(ErrorCode::kState,
                    "address " + std::to_string(address) + " (position " + std::to_string(ended) +
                        "): the block is not being filled",
                    {{"address", static_cast<std::int64_t>(address)}, {"position", static_cast<std::int64_t>(ended)}});
      }
      blocks_.set_filling(address, false);
    }
  } catch (...) {
    for (const Address address : addresses.first(ended)) blocks_.set_filling(address, true);
    throw;
  }
  for (const Address address : addresses) {
    const std::uint32_t slot = store_of(address).mark(block_of(address));
    if (node_of(address)->payload.forgotten) {
      blocks_.set_filling(address, true);
      blocks_.set_mark(address, CacheBlocks::kNeverFilled);
    } else {
      blocks_.set_mark(address, 0);
    }
    Fill& fill = fills_[slot];
    KVPOOL_DCHECK(fill.remaining > 0);
    if (--fill.remaining > 0) continue;
    if (copies_ != nullptr && !fill.pin.node->payload.forgotten) want_moved(*fill.pin.node);
    index_.unpin(fill.pin);  // it may free this block
    free_fills_.push_back(slot);
  }
}

void PromptCache::check_arrival(std::string_view name_space, const InsertItem& item) const {
  const std::size_t present = index_.peek(name_space, item.tokens, item.n_tokens, item.canonical).pages;
  for (std::size_t i = 0; i < present; ++i) {
    if (blocks_.is_local(item.canonical[i])) blocks_.check_filled(item.canonical[i], i);
  }
  const std::optional<std::size_t> at = first_misplaced(item, present);
  if (!at) return;
  throw Error(
      ErrorCode::kBusy,
      "address " + std::to_string(item.addresses[*at]) + " (position " + std::to_string(*at) +
          "): the block before what has arrived was forgotten meanwhile: try again",
      {{"address", static_cast<std::int64_t>(item.addresses[*at])}, {"position", static_cast<std::int64_t>(*at)}});
}

}  // namespace kvpool
