// The blocks that a peer has lent to this pool.
//
// Invariants
//   W1  A block is written by at most one transfer at a time, and only while it is borrowed.
//   W2  A block that is being written is not given back.
//   W3  No write overtakes an earlier one. Content that a cancelled transfer has sent over the link may still be on its
//       way when the transfer ends; until the peer has sent a later answer, no other route than the link writes.
//   W4  A recalled loan is over at its deadline: no new write of the block begins, it is not given back, and a write in
//       progress is the last.
//
// Thread-safety: all of it.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "kvpool/base/address.h"
#include "kvpool/base/medium.h"

namespace kvpool {

class BorrowedBlocks {
 public:
  // `blocks`: how many the peer has in each medium.
  BorrowedBlocks(std::string peer, std::uint32_t instance, MediumMap<std::uint32_t> blocks);

  // Throws Error kProtocol for blocks that the peer does not have, or has lent before.
  void add(std::span<const Address> addresses);
  // Throw Error kNotOwner (not borrowed), kStaleAddress (given back since), kArgument (twice in the list), kState
  // (written by another transfer), and change nothing then. `positions`: the positions for errors; without it, those in
  // the list.
  void begin_write(std::span<const Address> addresses, std::span<const std::size_t> positions = {});
  void end_write(std::span<const Address> addresses) noexcept;
  void drop_written(std::span<const Address> addresses) noexcept;  // ends the write, and they are no longer lent
  // Undoes drop_written(). REQUIRES: the peer has not been told.
  void take_again(std::span<const Address> addresses) noexcept;
  void remove(std::span<const Address> addresses);

  // Those of the addresses that are borrowed.
  std::vector<Address> borrowed_among(std::span<const Address> addresses) const;
  // Whether one of them is borrowed, or still being written.
  bool any_held(std::span<const Address> addresses) const noexcept;
  // Ends these loans: W4. Ignores other addresses.
  void end_loans(std::span<const Address> addresses) noexcept;
  // Throws kStaleAddress when one of these blocks, which are being written, is no longer borrowed.
  void check_still_borrowed(std::span<const Address> addresses) const;

  // Enclose the time from the end of a cancelled transfer to the peer's answer. Call begin_overdue() before
  // end_write().
  void begin_overdue() noexcept { overdue_.fetch_add(1); }
  void end_overdue() noexcept { overdue_.fetch_sub(1); }
  // Call after begin_write() for a write by another route than the link. Throws kBusy.
  void check_nothing_overdue() const;

  std::uint32_t count() const noexcept;

 private:
  // For each block: generation 23, from bit 8 | recalled 1 | being written 1 | borrowed 1.
  static constexpr std::uint32_t kBorrowed = 1;
  static constexpr std::uint32_t kWritten = 2;
  static constexpr std::uint32_t kRecalled = 4;
  static constexpr int kGenerationAt = 8;
  static bool is_loan(std::uint32_t word, Address address) noexcept {
    return word >> kGenerationAt == generation_of(address);
  }
  std::uint32_t* find(Address address) noexcept;
  const std::uint32_t* find(Address address) const noexcept {
    return const_cast<BorrowedBlocks*>(this)->find(address);  // NOLINT(cppcoreguidelines-pro-type-const-cast)
  }
  [[noreturn]] void throw_recalled(Address address, std::size_t position) const;
  std::uint32_t* checked(std::span<const Address> addresses, std::size_t i, std::size_t position);

  std::string peer_;
  std::uint32_t instance_;
  MediumMap<std::uint32_t> blocks_;
  mutable std::mutex mutex_;
  MediumMap<std::vector<std::uint32_t>> words_;  // empty until the first block is borrowed
  std::uint32_t count_ = 0;
  std::atomic<std::uint32_t> overdue_{0};
};

}  // namespace kvpool
