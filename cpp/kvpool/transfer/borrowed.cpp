#include "kvpool/transfer/borrowed.h"

#include <algorithm>
#include <iterator>

#include "kvpool/base/error.h"

namespace kvpool {
namespace {

constexpr std::int64_t kRetryAfterUs = 10'000;

}  // namespace

BorrowedBlocks::BorrowedBlocks(std::string peer, std::uint32_t instance, MediumMap<std::uint32_t> blocks)
    : peer_(std::move(peer)), instance_(instance), blocks_(blocks) {}

std::uint32_t* BorrowedBlocks::find(Address address) noexcept {
  const std::uint32_t bits = medium_bits_of(address);
  if (!is_medium(bits) || instance_of(address) != instance_) return nullptr;
  auto& words = words_[static_cast<Medium>(bits)];
  return block_of(address) < words.size() ? &words[block_of(address)] : nullptr;
}

void BorrowedBlocks::add(std::span<const Address> addresses) {
  const std::lock_guard lock(mutex_);
  const auto fail = [&](Address address, const char* what) {
    throw Error(ErrorCode::kProtocol, "peer " + peer_ + " lent " + what,
                {{"address", static_cast<std::int64_t>(address)}});
  };
  for (const Medium medium : kMedia) {
    if (words_[medium].empty()) words_[medium].resize(blocks_[medium]);
  }
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    std::uint32_t* const word = find(addresses[i]);
    if (word == nullptr || (*word & kBorrowed) != 0) {
      for (std::size_t j = 0; j < i; ++j) *find(addresses[j]) = 0;
      count_ -= static_cast<std::uint32_t>(i);
      fail(addresses[i], word == nullptr ? "a block that it has not" : "a block twice");
    }
    *word = generation_of(addresses[i]) << kGenerationAt | kBorrowed;
    ++count_;
  }
}

std::uint32_t* BorrowedBlocks::checked(std::span<const Address> addresses, std::size_t i, std::size_t position) {
  const Address address = addresses[i];
  std::uint32_t* const word = find(address);
  const auto fail = [&](ErrorCode code, const std::string& what) {
    throw Error(code, "address " + std::to_string(address) + " (position " + std::to_string(position) + ") " + what,
                {{"address", static_cast<std::int64_t>(address)},
                 {"position", static_cast<std::int64_t>(position)},
                 {"instance", instance_of(address)}});
  };
  if (word == nullptr || *word == 0) {
    fail(ErrorCode::kNotOwner, "is not lent to this pool by peer " + peer_ + ": alloc(n, instance=\"" + peer_ + "\")");
  }
  if (*word >> kGenerationAt != generation_of(address)) {
    fail(ErrorCode::kStaleAddress, "was given back to peer " + peer_ + " before");
  }
  if ((*word & kRecalled) != 0) throw_recalled(address, position);
  if ((*word & kWritten) != 0) {  // by this very list, or by another
    const auto before = addresses.first(i);
    if (std::find(before.begin(), before.end(), address) != before.end()) {
      fail(ErrorCode::kArgument, "stands twice in the list");
    }
    fail(ErrorCode::kState, "is being written by another transfer");
  }
  return word;
}

void BorrowedBlocks::begin_write(std::span<const Address> addresses, std::span<const std::size_t> positions) {
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    try {
      *checked(addresses, i, positions.empty() ? i : positions[i]) |= kWritten;
    } catch (...) {
      for (std::size_t j = 0; j < i; ++j) *find(addresses[j]) &= ~kWritten;
      throw;
    }
  }
}

void BorrowedBlocks::end_write(std::span<const Address> addresses) noexcept {
  const std::lock_guard lock(mutex_);
  for (const Address address : addresses) {
    if (std::uint32_t* const word = find(address); is_loan(*word, address)) *word &= ~kWritten;
  }
}

void BorrowedBlocks::remove(std::span<const Address> addresses) {
  begin_write(addresses);  // checks all, each once
  drop_written(addresses);
}

void BorrowedBlocks::drop_written(std::span<const Address> addresses) noexcept {
  const std::lock_guard lock(mutex_);
  for (const Address address : addresses) {
    std::uint32_t* const word = find(address);
    if (!is_loan(*word, address)) continue;
    if ((*word & kBorrowed) != 0) --count_;
    *word = (*word & kRecalled) != 0 ? *word & ~(kBorrowed | kWritten) : 0;
  }
}

void BorrowedBlocks::take_again(std::span<const Address> addresses) noexcept {
  const std::lock_guard lock(mutex_);
  for (const Address address : addresses) {
    std::uint32_t* const word = find(address);
    if (is_loan(*word, address) && (*word & kRecalled) != 0) continue;  // meanwhile
    *word = generation_of(address) << kGenerationAt | kBorrowed;
    ++count_;
  }
}

// --- recalls ---

void BorrowedBlocks::throw_recalled(Address address, std::size_t position) const {
  throw Error(ErrorCode::kStaleAddress,
              "address " + std::to_string(address) + " (position " + std::to_string(position) +
                  ") was recalled by peer " + peer_ + ", and the time to give it back is over",
              {{"address", static_cast<std::int64_t>(address)},
               {"position", static_cast<std::int64_t>(position)},
               {"instance", instance_of(address)}});
}

std::vector<Address> BorrowedBlocks::borrowed_among(std::span<const Address> addresses) const {
  std::vector<Address> borrowed;
  borrowed.reserve(addresses.size());
  const std::lock_guard lock(mutex_);
  std::ranges::copy_if(addresses, std::back_inserter(borrowed), [&](Address address) {
    const std::uint32_t* const word = find(address);
    return word != nullptr && is_loan(*word, address) && (*word & kBorrowed) != 0;
  });
  return borrowed;
}

bool BorrowedBlocks::any_held(std::span<const Address> addresses) const noexcept {
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(addresses, [&](Address address) {
    const std::uint32_t* const word = find(address);
    return word != nullptr && is_loan(*word, address) && (*word & (kBorrowed | kWritten)) != 0;
  });
}

void BorrowedBlocks::end_loans(std::span<const Address> addresses) noexcept {
  const std::lock_guard lock(mutex_);
  for (const Address address : addresses) {
    std::uint32_t* const word = find(address);
    if (word == nullptr) continue;
    if (*word == 0) {  // being given back: should that fail, it is not taken again
      *word = generation_of(address) << kGenerationAt | kRecalled;
    } else if (is_loan(*word, address)) {
      if ((*word & kBorrowed) != 0) --count_;
      *word = (*word & ~kBorrowed) | kRecalled;
    }
  }
}

void BorrowedBlocks::check_still_borrowed(std::span<const Address> addresses) const {
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    const std::uint32_t word = *find(addresses[i]);
    if (!is_loan(word, addresses[i]) || (word & kRecalled) != 0) throw_recalled(addresses[i], i);
  }
}

void BorrowedBlocks::check_nothing_overdue() const {
  if (overdue_.load() == 0) return;
  throw Error(ErrorCode::kBusy,
              "an earlier transfer to blocks of peer " + peer_ +
                  " was given up, and the peer has not yet said that what was sent by the connection is over",
              {{"retry_after_us", kRetryAfterUs}});
}

std::uint32_t BorrowedBlocks::count() const noexcept {
  const std::lock_guard lock(mutex_);
  return count_;
}

}  // namespace kvpool
