// The KV cache of one sequence: which block holds which of its tokens. A row of it is an rBlock of DistAttention
// (§4.3): a logical block, by its position, and the address of the physical one, which names instance, medium and
// block.
//
//      tokens       [0, T)   [T, 2T)   [2T, 3T)      T = block_tokens
//      block           0        1         2          the last one may be filled in part
//
// A sequence holds its blocks for reading: blocks that are freed, evicted, moved or deleted meanwhile keep their
// content where it is, and are reused after the sequence is closed. It does not own them: who allocated them frees
// them.
//
// Thread-safety: all of it. Every method that throws has changed nothing.
//
// The pool outlives it. It does not keep the pool: a thread of the pool may hold the last reference to a sequence, and
// would then wait for its own end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "kvpool/base/address.h"

namespace kvpool {

class Pool;

class Sequence {
 public:
  // `tokens`: how many tokens have been written, from the first on; nullopt: as many as the blocks hold. Throws
  // kUnsupported when attention cannot read the pool's blocks (raw blocks, an element type without a kernel, blocks on
  // a GPU or in ranks), kArgument when the blocks hold fewer tokens, and kStaleAddress, kNotOwner, kState as a transfer
  // of these blocks would.
  Sequence(Pool& pool, std::span<const Address> addresses, std::optional<std::uint64_t> tokens);
  ~Sequence() { close(); }
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;

  // Throws kUnsupported when attention cannot read the blocks of this pool.
  static void check_pool(const Pool& pool);

  // Adds blocks behind the last one. `tokens`: how many tokens have been written now; nullopt: as many as before.
  // Throws kState when it is closed, and as the constructor.
  void append(std::span<const Address> addresses, std::optional<std::uint64_t> tokens);
  // Says how many tokens have been written. It may go back, when an engine rejects speculated tokens. Throws kArgument
  // when the blocks hold fewer, kState when it is closed.
  void set_tokens(std::uint64_t tokens);
  // Lets the blocks go, at once or when no attention reads them any longer. Idempotent.
  void close() noexcept;

  Pool& pool() const noexcept { return pool_; }
  std::uint64_t tokens() const;
  std::vector<Address> addresses() const;  // also of a closed one
  bool closed() const;

  // --- for attention ---

  struct Reading {
    std::vector<Address> addresses;
    std::uint64_t tokens = 0;
  };
  // Until as many calls of end_reading(), closing lets no block go. Throws kState when it is closed.
  Reading begin_reading();
  void end_reading() noexcept;

 private:
  void check_open() const;
  void check_tokens(std::uint64_t tokens, std::size_t blocks) const;
  void hold(std::span<const Address> addresses) const;  // all or none
  void release_if_unread() noexcept;

  Pool& pool_;
  mutable std::mutex mutex_;  // guards all below; taken before the pool's locks
  std::vector<Address> addresses_;
  std::uint64_t tokens_ = 0;
  std::size_t readings_ = 0;
  bool closed_ = false;
  bool released_ = false;
};

}  // namespace kvpool
