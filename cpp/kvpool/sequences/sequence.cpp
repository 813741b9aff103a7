#include "kvpool/sequences/sequence.h"

#include <algorithm>
#include <string>

#include "kvpool/attention/kernel.h"
#include "kvpool/base/error.h"
#include "kvpool/pool/peer_claims.h"
#include "kvpool/pool/pool.h"

namespace kvpool {
namespace {

constexpr std::uint64_t kApplication = 0;  // as a reader of blocks

}  // namespace

Sequence::Sequence(Pool& pool, std::span<const Address> addresses, std::optional<std::uint64_t> tokens)
    : pool_(pool), addresses_(addresses.begin(), addresses.end()) {
  pool_.guard();
  check_pool(pool_);
  tokens_ = tokens.value_or(addresses.size() * std::uint64_t{pool_.layout().block_tokens});
  check_tokens(tokens_, addresses.size());
  hold(addresses);
}

void Sequence::check_pool(const Pool& pool) {
  if (pool.sharding()) {
    throw Error(ErrorCode::kUnsupported,
                "the blocks of a logical instance are in its ranks: attention cannot read them");
  }
  const PageFormat& format = pool.layout().format;
  if (!format.known()) {
    throw Error(ErrorCode::kUnsupported, "raw blocks have no heads: attention needs a pool with a KVLayout");
  }
  if (kv_type_index(format.dtype) < 0) {
    throw Error(ErrorCode::kUnsupported, std::string("attention cannot read blocks of ") + dtype_name(format.dtype));
  }
}

void Sequence::append(std::span<const Address> addresses, std::optional<std::uint64_t> tokens) {
  const std::lock_guard lock(mutex_);
  check_open();
  const std::uint64_t written = tokens.value_or(tokens_);
  check_tokens(written, addresses_.size() + addresses.size());
  addresses_.reserve(addresses_.size() + addresses.size());
  hold(addresses);
  addresses_.insert(addresses_.end(), addresses.begin(), addresses.end());
  tokens_ = written;
}

void Sequence::set_tokens(std::uint64_t tokens) {
  const std::lock_guard lock(mutex_);
  check_open();
  check_tokens(tokens, addresses_.size());
  tokens_ = tokens;
}

void Sequence::close() noexcept {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  release_if_unread();
}

std::uint64_t Sequence::tokens() const {
  const std::lock_guard lock(mutex_);
  return tokens_;
}

std::vector<Address> Sequence::addresses() const {
  const std::lock_guard lock(mutex_);
  return addresses_;
}

bool Sequence::closed() const {
  const std::lock_guard lock(mutex_);
  return closed_;
}

Sequence::Reading Sequence::begin_reading() {
  const std::lock_guard lock(mutex_);
  check_open();
  Reading reading{addresses_, tokens_};
  ++readings_;
  return reading;
}

void Sequence::end_reading() noexcept {
  const std::lock_guard lock(mutex_);
  --readings_;
  if (closed_) release_if_unread();
}

// REQUIRES: mutex_ is held.
void Sequence::check_open() const {
  pool_.guard();
  if (closed_) throw Error(ErrorCode::kState, "the sequence is closed");
}

void Sequence::check_tokens(std::uint64_t tokens, std::size_t blocks) const {
  const std::uint64_t capacity = blocks * std::uint64_t{pool_.layout().block_tokens};
  if (tokens <= capacity) return;
  throw Error(ErrorCode::kArgument,
              "a sequence of " + std::to_string(blocks) + " blocks holds " + std::to_string(capacity) +
                  " tokens, and not " + std::to_string(tokens),
              {{"tokens", static_cast<std::int64_t>(tokens)}, {"capacity", static_cast<std::int64_t>(capacity)}});
}

void Sequence::hold(std::span<const Address> addresses) const {
  PeerClaims& claims = pool_.for_peers();
  claims.hold_for_reading(addresses.data(), addresses.size(), kApplication);
  if (!pool_.on_device()) return;
  const auto on_gpu = std::ranges::find(addresses, Medium::kHbm, medium_of);
  if (on_gpu == addresses.end()) return;
  claims.release_reading(addresses.data(), addresses.size());
  const auto position = on_gpu - addresses.begin();
  throw Error(ErrorCode::kUnsupported,
              "address " + std::to_string(*on_gpu) + " (position " + std::to_string(position) +
                  "): the block is on a GPU, whose memory attention on the CPU cannot read",
              {{"address", static_cast<std::int64_t>(*on_gpu)}, {"position", position}});
}

// REQUIRES: mutex_ is held.
void Sequence::release_if_unread() noexcept {
  if (released_ || readings_ > 0) return;
  released_ = true;
  pool_.for_peers().release_reading(addresses_.data(), addresses_.size());
}

}  // namespace kvpool
