// The blocks of one sequence that lie in this pool, held for reading: for this pool's application, or for a peer whose
// sequence it is.
//
// Blocks that are freed, evicted, moved or deleted meanwhile keep their content where it is, and are reused after they
// have been removed from here. Nothing here owns them: who allocated them frees them.
//
//   A12  A block is held once for each time that it was added, and is let go once: when it has been removed, or this is
//       closed, and every reading that began before has ended.
//
// Thread-safety: all of it. Every method that throws has changed nothing.
//
// The pool outlives it. It does not keep the pool: a thread of the pool may hold the last reference to it, and would
// then wait for its own end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "kvpool/base/address.h"
#include "kvpool/base/fork_guard.h"
#include "kvpool/sequences/block_runs.h"
#include "kvpool/sequences/readable_blocks.h"
#include "kvpool/sequences/readings.h"

namespace kvpool {

class Pool;

class SequenceBlocks : public std::enable_shared_from_this<SequenceBlocks> {
 public:
  static constexpr std::uint64_t kApplication = 0;

  // `reader`: the incarnation of the peer that reads, which may not read blocks lent to another peer; kApplication.
  // `with_gpu`: attention can read blocks that are on the pool's GPU. REQUIRES: check_pool().
  SequenceBlocks(Pool& pool, std::uint64_t reader, bool with_gpu)
      : pool_(pool), reader_(reader), with_gpu_(with_gpu), made_in_(fork_generation()) {}
  ~SequenceBlocks() { close(); }
  SequenceBlocks(const SequenceBlocks&) = delete;
  SequenceBlocks& operator=(const SequenceBlocks&) = delete;

  // Throws kUnsupported when attention cannot read the blocks of this pool: raw blocks, an element type without a
  // kernel, blocks in ranks.
  static void check_pool(const Pool& pool);

  // Throws kArgument when one of these blocks has an address already, kUnsupported for a block on a GPU that
  // attention cannot read, kState when this is closed, and kStaleAddress, kNotOwner, kState as a transfer of these
  // blocks would.
  void add(std::uint64_t first, std::span<const Address> addresses) { exchange({}, {{first, addresses}}); }
  // Removes the blocks of ascending ranges, and adds others, at once. Throws as add().
  struct Added {
    std::uint64_t first = 0;
    std::span<const Address> addresses;
  };
  void exchange(const std::vector<BlockRange>& removed, const std::vector<Added>& added);
  // Returns how many blocks of the range had an address. Throws std::bad_alloc.
  std::size_t remove(const BlockRange& range);
  // Removes these addresses wherever they stand, and returns how many blocks that were. Without memory for that it
  // closes.
  std::size_t drop(const std::unordered_set<Address>& addresses) noexcept;
  // How many of the blocks have one of these addresses; without memory to find out, all.
  std::size_t count(const std::unordered_set<Address>& addresses) const noexcept;
  // Idempotent.
  void close() noexcept;

  Pool& pool() const noexcept { return pool_; }
  std::size_t blocks() const;

  // The blocks at this moment. Throws kState when it is closed.
  ReadableBlocks read();

 private:
  struct Reading;
  struct Removed {
    std::uint64_t before;  // readings with lower numbers may read them
    std::vector<Address> addresses;
  };
  void check_open() const;
  void hold(std::span<const Address> addresses) const;  // all or none
  void hold(const std::vector<Added>& added) const;
  void replace(std::shared_ptr<const BlockRuns> runs, std::vector<Address> removed);
  void end_reading(std::uint64_t number) noexcept;
  void release_unread() noexcept;

  Pool& pool_;
  const std::uint64_t reader_;
  const bool with_gpu_;
  const std::uint32_t made_in_;  // fork generation: in a child nothing is let go, and no lock is taken for that
  mutable std::mutex mutex_;     // guards all below; taken before the pool's locks
  std::shared_ptr<const BlockRuns> runs_ = std::make_shared<BlockRuns>();  // readings share it, so it is never
                                                                           // changed; null once let go
  std::vector<Removed> removed_;
  Readings readings_;
  bool closed_ = false;
};

}  // namespace kvpool
