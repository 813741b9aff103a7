// The KV cache of one sequence, wherever its blocks lie: in this pool, or in pools of peers. A row of it is an rBlock
// of DistAttention (section 4.3): a logical block, by its position, and the address of the physical one, which names
// instance, medium and block.
//
//      tokens       [0, T)   [T, 2T)   [2T, 3T)      T = block_tokens
//      block           0        1         2          the last one may be filled in part
//
// Blocks of this pool it holds by SequenceBlocks, those of a peer by a view there. It owns none: who allocated or
// borrowed a block frees it.
//
// Thread-safety: all of it. Every method that throws has changed nothing. The node outlives it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "kvpool/attention/token_range.h"
#include "kvpool/base/address.h"
#include "kvpool/base/wait.h"
#include "kvpool/sequences/sequence_blocks.h"
#include "kvpool/views/remote_view.h"

namespace kvpool {

class PeerNode;
class Pool;

class Sequence {
 public:
  // `tokens`: how many tokens have been written, from the first on; nullopt: as many as the blocks hold. Waits until
  // peers hold their blocks. Throws kUnsupported when attention cannot read the pool's blocks, kArgument when the
  // blocks hold fewer tokens, kStaleAddress, kNotOwner, kState as a transfer of these blocks would, and what connecting
  // to peers and waiting for them throws.
  Sequence(PeerNode& node, std::span<const Address> addresses, std::optional<std::uint64_t> tokens,
           const Waiting& waiting);
  ~Sequence() { close(); }
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;

  // Adds blocks behind the last one. `tokens`: how many tokens have been written now; nullopt: as many as before.
  // Throws kState when it is closed, and as the constructor.
  void append(std::span<const Address> addresses, std::optional<std::uint64_t> tokens, const Waiting& waiting);
  // Puts other blocks in the place of those from block `first` on, which have the same tokens: attention that begins
  // later reads the new ones. Returns the addresses that stood there. Throws as append(), and kArgument when the
  // sequence has fewer blocks.
  std::vector<Address> replace(std::uint64_t first, std::span<const Address> addresses, const Waiting& waiting);
  // Says how many tokens have been written. It may go back, when an engine rejects speculated tokens. Throws kArgument
  // when the blocks hold fewer, kState when it is closed.
  void set_tokens(std::uint64_t tokens);
  // Lets the blocks go, at once or when no attention reads them any longer. Idempotent; does not wait.
  void close() noexcept;

  PeerNode& node() const noexcept { return node_; }
  std::uint64_t tokens() const;
  std::vector<Address> addresses() const;  // also of a closed one
  bool closed() const;
  // Written tokens in blocks of peers that are lost.
  std::vector<TokenRange> lost() const;

  // --- for attention ---

  // Blocks of a sequence that follow each other in one pool.
  struct Place {
    BlockRange blocks;
    std::shared_ptr<RemoteView> view;  // null: in this pool
  };
  class Removals;
  struct Snapshot {
    std::uint64_t tokens;
    std::vector<Place> places;  // ascending; together they are all blocks
    ReadableBlocks here;
    std::shared_ptr<Removals> removals;
  };
  // As it is now. Its blocks keep their content: those here as long as `here`, and those of peers as long as `removals`
  // or a call that was sent before it ended. Throws kState when it is closed.
  Snapshot snapshot() const;
  // The written tokens in blocks of a place.
  TokenRange tokens_in(const BlockRange& blocks, std::uint64_t tokens) const noexcept;

 private:
  void check_open() const;
  void check_tokens(std::uint64_t tokens, std::size_t blocks) const;
  std::vector<Address> put(std::uint64_t first, std::span<const Address> addresses, std::optional<std::uint64_t> tokens,
                           const Waiting& waiting);
  std::vector<Place> place_all(std::uint64_t first, std::span<const Address> addresses, const Waiting& waiting);
  std::shared_ptr<RemoteView> view_for(const std::shared_ptr<Session>& session, const BlockRange& blocks) const;
  void exchange_here(std::uint64_t first, std::span<const Address> addresses, const std::vector<Place>& added);

  PeerNode& node_;
  const std::uint32_t block_tokens_;
  std::mutex changing_;       // held by one change from its begin to its end: it may wait for peers
  mutable std::mutex mutex_;  // guards all below; taken after changing_, before the locks of pool and session
  std::shared_ptr<SequenceBlocks> here_;
  std::vector<Place> places_;
  std::shared_ptr<Removals> removals_;  // of the next change
  std::vector<Address> addresses_;
  std::uint64_t tokens_ = 0;
  bool closed_ = false;
};

}  // namespace kvpool
