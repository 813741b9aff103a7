// Blocks that transfers, saves and sequences read: they are not reused before the last of them has ended.
#include <string>

#include "kvpool/base/error.h"
#include "kvpool/blocks/cache_blocks.h"

namespace kvpool {

void CacheBlocks::check_not_read(Address address, std::size_t position) const {
  const auto& readers = readers_[medium_of(address)];
  if (readers.empty() || readers[store_of(address).slot_of(block_of(address))] == 0) return;
  throw Error(ErrorCode::kState,
              "address " + std::to_string(address) + " (position " + std::to_string(position) +
                  "): a transfer, a save or a sequence reads the block; wait for it, or close the sequence",
              {{"address", static_cast<std::int64_t>(address)}, {"position", static_cast<std::int64_t>(position)}});
}

void CacheBlocks::check_unread(const Address* addresses, std::size_t n) const {
  for (std::size_t i = 0; i < n; ++i) {
    if (is_local(addresses[i])) check_not_read(addresses[i], i);
  }
}

void CacheBlocks::check_freeable(const Address* addresses, std::size_t n) const {
  if (!engine_allocates_) return;
  for (std::size_t i = 0; i < n; ++i) {
    if (is_local(addresses[i]) && medium_of(addresses[i]) == Medium::kHbm) check_not_read(addresses[i], i);
  }
}

void CacheBlocks::check_filled(Address address, std::size_t position) const {
  if (!filling(address)) return;
  const bool never = never_filled(address);
  throw Error(
      never ? ErrorCode::kState : ErrorCode::kBusy,
      "address " + std::to_string(address) + " (position " + std::to_string(position) + "): " +
          (never ? "the block was forgotten before it was filled" : "the content of the block is still to come"),
      {{"address", static_cast<std::int64_t>(address)}, {"position", static_cast<std::int64_t>(position)}});
}

void CacheBlocks::hold_for_reading(const Address* addresses, std::size_t n, std::uint64_t for_incarnation) {
  for (const Medium medium : kMedia) {
    if (readers_[medium].empty()) readers_[medium].begin(store(medium).slots());
  }
  for (std::size_t i = 0; i < n; ++i) {
    try {
      check(addresses[i], i, std::nullopt);
      const BlockStore& blocks = store_of(addresses[i]);
      const BlockState state = blocks.state(block_of(addresses[i]));
      if (state != BlockState::kQuarantined) check_filled(addresses[i], i);
      if (state == BlockState::kLent && for_incarnation != 0 && blocks.tag(block_of(addresses[i])) != for_incarnation) {
        throw Error(ErrorCode::kNotOwner,
                    "address " + std::to_string(addresses[i]) + " (position " + std::to_string(i) +
                        "): the block is lent to another peer",
                    {{"address", static_cast<std::int64_t>(addresses[i])}, {"position", static_cast<std::int64_t>(i)}});
      }
      if (state == BlockState::kQuarantined && for_incarnation != 0) {  // a peer may not have heard of it yet
        throw Error(ErrorCode::kStaleAddress,
                    "address " + std::to_string(addresses[i]) + " (position " + std::to_string(i) +
                        "): the block was recalled, or what was to be written there failed",
                    {{"address", static_cast<std::int64_t>(addresses[i])}, {"position", static_cast<std::int64_t>(i)}});
      }
      std::uint16_t& readers = readers_of(addresses[i]);
      const bool readable =
          state == BlockState::kActive || state == BlockState::kHistorical || state == BlockState::kLent;
      if (readable && readers < UINT16_MAX) {
        ++readers;
        continue;
      }
      const std::string why = readable ? "too many transfers and sequences read it" : block_state_name(state);
      throw Error(ErrorCode::kState,
                  "address " + std::to_string(addresses[i]) + " (position " + std::to_string(i) +
                      "): the block cannot be sent or read: " + why,
                  {{"address", static_cast<std::int64_t>(addresses[i])}, {"position", static_cast<std::int64_t>(i)}});
    } catch (...) {
      for (std::size_t j = 0; j < i; ++j) --readers_of(addresses[j]);
      throw;
    }
  }
}

void CacheBlocks::release_reading(const Address* addresses, std::size_t n) noexcept {
  for (std::size_t i = 0; i < n; ++i) {
    if (--readers_of(addresses[i]) > 0 || !is_unread(addresses[i])) continue;
    --unread_[medium_of(addresses[i])];
    release(&addresses[i], 1);
  }
}

void CacheBlocks::wait_for_readers(Medium medium, std::uint32_t block) noexcept {
  stores_[medium].set_state(block, BlockState::kReserved);
  stores_[medium].set_tag(block, kUnreadTag);
  ++unread_[medium];
}

}  // namespace kvpool
