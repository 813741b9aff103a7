#include "kvpool/pool/cache_copies.h"

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "kvpool/base/error.h"
#include "kvpool/blocks/device_mover.h"
#include "kvpool/pool/swap_handle.h"

namespace kvpool {
namespace {

constexpr std::uint64_t kNoPeer = 0;

void check_medium(std::span<const Address> addresses, Medium wanted) {
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    if (medium_bits_of(addresses[i]) == static_cast<std::uint32_t>(wanted)) continue;
    throw Error(ErrorCode::kArgument,
                "address " + std::to_string(addresses[i]) + " (position " + std::to_string(i) + ") is not in " +
                    medium_name(wanted),
                {{"address", static_cast<std::int64_t>(addresses[i])}, {"position", static_cast<std::int64_t>(i)}});
  }
}

// Blocks that keep their content until this goes.
class Reading {
 public:
  Reading(PeerClaims& claims, std::vector<Address> addresses) : claims_(claims), addresses_(std::move(addresses)) {
    claims.hold_for_reading(addresses_.data(), addresses_.size(), kNoPeer);
  }
  ~Reading() { claims_.release_reading(addresses_.data(), addresses_.size()); }
  Reading(const Reading&) = delete;
  Reading& operator=(const Reading&) = delete;

  std::span<const Address> addresses() const noexcept { return addresses_; }

 private:
  PeerClaims& claims_;
  const std::vector<Address> addresses_;
};

}  // namespace

// A prompt whose blocks [cached, end) are to be copied and cached. What is cached of it is pinned. The caller gives the
// blocks [first, end).
class CacheCopies::Save {
 public:
  Save(CacheCopies& copies, std::string_view name_space, std::span<const Token> tokens, std::size_t first,
       std::span<const Address> addresses)
      : copies_(copies), name_space_(name_space), tokens_(tokens.begin(), tokens.end()) {
    copies.check_prompt(tokens, first, addresses);
    all_.resize(first + addresses.size());
    const IndexHit hit = copies.claims_.match(name_space, tokens_.data(), tokens_.size(), all_.data());
    prefix_ = hit.pin;
    cached_ = hit.pages;
    try {
      check_begin(first);
      reading_.emplace(copies.claims_,
                       std::vector(addresses.end() - static_cast<std::ptrdiff_t>(missing()), addresses.end()));
    } catch (...) {
      let_go(prefix_);
      throw;
    }
  }
  ~Save() { let_go(prefix_); }
  Save(const Save&) = delete;
  Save& operator=(const Save&) = delete;

  std::size_t missing() const noexcept { return all_.size() - cached_; }

  void carry_out(const CopyOrder& order) {
    if (missing() == 0) return;
    const std::span<Address> to = std::span(all_).subspan(cached_);
    copies_.claims_.take(to.size(), Medium::kDram, BlockState::kReserved, kNoPeer, 0, /*evict=*/true, to.data());
    try {
      copies_.moves_.copy(TierWay::kOut, reading_->addresses(), to, order);
      std::vector<Address> canonical(all_.size());
      const InsertItem item{tokens_.data(), tokens_.size(), all_.data(), all_.size(), canonical.data()};
      let_go(copies_.claims_.insert_arrived(name_space_, item, to));
    } catch (...) {
      copies_.claims_.release(to.data(), to.size());
      throw;
    }
  }

 private:
  void check_begin(std::size_t first) const {
    if (cached_ >= first) return;
    throw Error(ErrorCode::kState, "the first " + std::to_string(first) +
                                       " blocks of the prompt are not given, and of these only " +
                                       std::to_string(cached_) + " are cached");
  }
  void let_go(const IndexPin& pin) noexcept {
    if (pin.node != nullptr) copies_.pins_.unpin(&pin, 1);
  }

  CacheCopies& copies_;
  const std::string name_space_;
  const std::vector<Token> tokens_;
  std::vector<Address> all_;  // of the whole prompt: cached ones, then copies
  IndexPin prefix_;
  std::size_t cached_ = 0;
  std::optional<Reading> reading_;
};

// Blocks that are read, and blocks of the caller that are reserved until their content has come.
class CacheCopies::Copy {
 public:
  Copy(CacheCopies& copies, TierWay way, std::span<const Address> addresses, std::span<const Address> into)
      : copies_(copies), way_(way), into_(into.begin(), into.end()) {
    if (addresses.size() != into.size()) {
      throw Error(
          ErrorCode::kArgument,
          std::to_string(addresses.size()) + " blocks to copy, and " + std::to_string(into.size()) + " to copy into",
          {{"needed", static_cast<std::int64_t>(addresses.size())}, {"given", static_cast<std::int64_t>(into.size())}});
    }
    check_medium(addresses, way == TierWay::kIn ? Medium::kDram : Medium::kHbm);
    check_medium(into, way == TierWay::kIn ? Medium::kHbm : Medium::kDram);
    reading_.emplace(copies.claims_, std::vector(addresses.begin(), addresses.end()));
    copies.claims_.reserve_active(into_.data(), into_.size(), kNoPeer, 0);
  }
  ~Copy() { copies_.claims_.take_over(into_.data(), into_.size()); }
  Copy(const Copy&) = delete;
  Copy& operator=(const Copy&) = delete;

  void carry_out(const CopyOrder& order) { copies_.moves_.copy(way_, reading_->addresses(), into_, order); }

 private:
  CacheCopies& copies_;
  const TierWay way_;
  const std::vector<Address> into_;
  std::optional<Reading> reading_;
};

// Before anything is done.
void CacheCopies::check_memory(const CallerStream& after) {
  guard_.check();
  if (!memory_.two_tiers()) {
    throw Error(ErrorCode::kState, "copies go between HBM and DRAM: this pool has no HBM or no DRAM blocks");
  }
  {
    const SpaceLock lock = blocks_.lock();
    blocks_.check_open(Medium::kHbm);
  }
  memory_.check_stream(after);
}

void CacheCopies::check_prompt(std::span<const Token> tokens, std::size_t first,
                               std::span<const Address> addresses) const {
  const std::uint32_t block_tokens = memory_.layout().block_tokens;
  const std::size_t blocks = tokens.size() / block_tokens;
  if (tokens.size() % block_tokens != 0 || addresses.size() > blocks || first != blocks - addresses.size()) {
    throw Error(ErrorCode::kArgument,
                std::to_string(tokens.size()) + " tokens, and " + std::to_string(addresses.size()) + " blocks of " +
                    std::to_string(block_tokens) + " from block " + std::to_string(first) + " on: save whole blocks",
                {{"tokens", static_cast<std::int64_t>(tokens.size())},
                 {"given", static_cast<std::int64_t>(addresses.size())},
                 {"block_tokens", block_tokens}});
  }
  {
    const SpaceLock lock = blocks_.lock();
    blocks_.check_active_and_distinct(addresses.data(), addresses.size(), /*skip_cached=*/false);
  }
  check_medium(addresses, Medium::kHbm);
}

std::size_t CacheCopies::save(std::string_view name_space, std::span<const Token> tokens, std::size_t first,
                              std::span<const Address> addresses, const CallerStream& after) {
  check_memory(after);
  Save save(*this, name_space, tokens, first, addresses);
  save.carry_out(after);
  return save.missing();
}

StartedSave CacheCopies::begin_save(std::string_view name_space, std::span<const Token> tokens, std::size_t first,
                                    std::span<const Address> addresses, const CallerStream& after) {
  check_memory(after);
  auto save = std::make_shared<Save>(*this, name_space, tokens, first, addresses);
  const std::size_t blocks = save->missing();
  return {moves_.begin_copy(TierWay::kOut, after, [save = std::move(save)] { save->carry_out(CopyOrder::met()); }),
          blocks};
}

void CacheCopies::copy(TierWay way, std::span<const Address> addresses, std::span<const Address> into,
                       const CallerStream& after) {
  check_memory(after);
  Copy(*this, way, addresses, into).carry_out(after);
}

std::shared_ptr<Swap> CacheCopies::begin_copy(TierWay way, std::span<const Address> addresses,
                                              std::span<const Address> into, const CallerStream& after) {
  check_memory(after);
  auto copy = std::make_shared<Copy>(*this, way, addresses, into);
  return moves_.begin_copy(way, after, [copy = std::move(copy)] { copy->carry_out(CopyOrder::met()); });
}

}  // namespace kvpool
