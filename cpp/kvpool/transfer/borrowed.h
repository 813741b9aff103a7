// The blocks that a peer has lent to this pool.
//
// Invariants
//   W1  A block is written by at most one transfer at a time, and only while it is borrowed.
//   W2  A block that is being written is not given back.
//   W3  No write overtakes an earlier one. What a transfer has sent by the link and then given up may still be on its
//       way when it ends; until the peer has answered behind it, nobody writes past the link.
//   W4  A loan that was recalled is over at its deadline: nothing begins to write the block, or gives it back, and what
//       is writing it is the last that does.
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
  // `blocks` that the peer has of each medium.
  BorrowedBlocks(std::string peer, std::uint32_t instance, MediumMap<std::uint32_t> blocks);

  // Throws Error kProtocol when the peer lent what it has not, or lent before.
  void add(std::span<const Address> addresses);
  // Throw Error kNotOwner (not borrowed), kStaleAddress (given back since), kArgument (twice in the list), kState
  // (written by another transfer), and change nothing then. `positions`: what an error calls each one's; else that in
  // the list.
  void begin_write(std::span<const Address> addresses, std::span<const std::size_t> positions = {});
  void end_write(std::span<const Address> addresses) noexcept;
  void drop_written(std::span<const Address> addresses) noexcept;  // ends the write, and they are no longer lent
  // Undoes that. REQUIRES: the peer has not heard of it.
  void take_again(std::span<const Address> addresses) noexcept;
  void remove(std::span<const Address> addresses);

  // Those that are borrowed.
  std::vector<Address> borrowed_among(std::span<const Address> addresses) const;
  // Whether one of them is borrowed, or still being written.
  bool any_held(std::span<const Address> addresses) const noexcept;
  // These loans are over: W4. Others are left alone.
  void end_loans(std::span<const Address> addresses) noexcept;
  // Throws kStaleAddress when one of these that are being written is not borrowed any more.
  void check_still_borrowed(std::span<const Address> addresses) const;

  // Around the time from the end of a transfer that was given up to the peer's answer. Before its end_write().
  void begin_overdue() noexcept { overdue_.fetch_add(1); }
  void end_overdue() noexcept { overdue_.fetch_sub(1); }
  // For a write past the link, after its begin_write(). Throws kBusy.
  void check_nothing_overdue() const;

  std::uint32_t count() const noexcept;

 private:
  // Of each block: generation 23, from bit 8 | recalled 1 | being written 1 | borrowed 1.
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
