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

#include <condition_variable>
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
  // The same for any blocks, in ascending order, whose content was copied from `old` after set_backs() had been
  // `copied_at`. Throws kState when other addresses stand there, or one of the blocks may have been written since.
  void switch_blocks(std::span<const std::uint64_t> blocks, std::span<const Address> old,
                     std::span<const Address> addresses, std::uint64_t copied_at, const Waiting& waiting);
  // How often the number of tokens was set back.
  std::uint64_t set_backs() const;
  // Says how many tokens have been written. It may go back, when an engine rejects speculated tokens. Throws kArgument
  // when the blocks hold fewer, kState when it is closed, or when it goes back into a block that lies with a peer: the
  // engine could not write it.
  void set_tokens(std::uint64_t tokens);
  // Lets the blocks go, at once or when no attention reads them any longer. Idempotent; does not wait.
  void close() noexcept;

  PeerNode& node() const noexcept { return node_; }
  std::uint64_t tokens() const;
  std::vector<Address> addresses() const;  // also of a closed one
  bool closed() const;
  // Written tokens in blocks of peers that are lost, or that have recalled the blocks.
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
  // One change of each kind at a time, from its begin to its end: it may wait for peers.
  class Turn;
  struct Change {
    std::vector<std::uint64_t> blocks;  // ascending
    std::span<const Address> addresses;
    std::span<const Address> old = {};         // that must stand there; empty: any
    std::uint64_t copied_at = UINT64_MAX;      // see switch_blocks()
    std::optional<std::uint64_t> tokens = {};  // from now on; nullopt: as before
  };
  std::vector<Address> put(const Change& change, const Waiting& waiting);
  void check_unchanged(const Change& change) const;
  std::vector<Place> place_all(const Change& change, const std::vector<BlockRange>& runs, const Waiting& waiting);
  std::shared_ptr<RemoteView> view_for(const std::shared_ptr<Session>& session,
                                       const std::vector<BlockRange>& blocks) const;

  PeerNode& node_;
  const std::uint32_t block_tokens_;
  const std::uint32_t made_in_;  // fork generation
  mutable std::mutex mutex_;     // guards all below; taken before the locks of pool and session
  std::condition_variable turn_ended_;
  bool appending_ = false;
  bool replacing_ = false;
  std::shared_ptr<SequenceBlocks> here_;
  std::vector<Place> places_;
  std::shared_ptr<Removals> removals_;  // of the next change
  std::vector<Address> addresses_;
  std::uint64_t tokens_ = 0;
  // When the number of tokens was set back, and to how many: those that no later one went below. Ascending.
  struct SetBack {
    std::uint64_t number;
    std::uint64_t tokens;
  };
  std::vector<SetBack> set_backs_;
  std::uint64_t set_backs_made_ = 0;
  bool closed_ = false;
};

}  // namespace kvpool
