// Blocks of a pool's DRAM under keys in place of tokens. It stands on the verbs of the pool as an application does: it
// allocates the blocks, copies into and out of them, and frees them.
//
// Invariants
//   G3  Every value in the index is the address of an active DRAM block of the pool that this cache has allocated.
//   G4  The blocks in the index and those that are being filled are together at most `blocks_max`.
//
// The pool's prompt cache does not evict these blocks, and they count as active there. The other way round, the cache
// makes the pool drop cached prompts to come to blocks_max, and where the pool has none left it gives up its own
// coldest.
//
// Locks: this one, then the space's. Under it nothing is copied, and no block is allocated.
//
// Thread-safety: all of it. Errors: a method that throws has changed nothing, except that room that was made stays
// made, and that the destination of a load that fails has undefined content. Pool's errors go through: kClosed, kFork,
// ...
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "kvpool/exec/copy_threads.h"
#include "kvpool/index/key_pins.h"
#include "kvpool/index/keyed_index.h"
#include "kvpool/pool/pool.h"

namespace kvpool {

struct KeyedCacheStats {
  std::size_t blocks = 0;     // stored
  std::size_t evictable = 0;  // of these, not pinned
  std::size_t blocks_max = 0;
  std::size_t index_bytes = 0;
  std::uint64_t saved_blocks = 0;      // newly stored
  std::uint64_t duplicate_blocks = 0;  // that were stored before
  std::uint64_t found_blocks = 0;      // by match and load
  std::uint64_t missed_blocks = 0;
  std::uint64_t evicted_blocks = 0;
};

class KeyedCache final : public KeyPinOwner, public std::enable_shared_from_this<KeyedCache> {
 public:
  // Throws kArgument for key_bytes as KeyedIndex does, and unless blocks_max is 1 to the pool's DRAM blocks.
  // `name`: for peers, which ask for it once it is among Pool::named_caches(); "" for none.
  KeyedCache(std::shared_ptr<Pool> pool, std::size_t key_bytes, std::size_t blocks_max, std::string name = {});
  ~KeyedCache() override;
  KeyedCache(const KeyedCache&) = delete;
  KeyedCache& operator=(const KeyedCache&) = delete;

  bool stands_on(const Pool& pool) const noexcept { return pool_.get() == &pool; }
  const std::string& name() const noexcept { return name_; }
  std::size_t key_bytes() const noexcept { return index_.key_bytes(); }
  std::size_t block_bytes() const noexcept { return pool_->layout().block_bytes(); }

  // Documented in KeyedIndex.
  std::size_t exists(const std::byte* keys, std::size_t n, bool* stored);
  // The values are addresses, which are valid while the pins hold.
  KeyedIndex::Hit match(const std::byte* keys, std::size_t n, bool every, std::vector<KeyedEntry*>& pins,
                        Address* addresses, bool* stored);

  // The same for a peer: it does not count among found and missed blocks. Throws kState once the cache is closed.
  KeyedIndex::Hit match_for_peer(const std::byte* keys, std::size_t n, bool every, std::vector<KeyedEntry*>& pins,
                                 Address* addresses, bool* stored);

  // Stores copies of the caller's active HBM blocks, one for each key; of keys that are stored already, copies nothing.
  // Returns how many are new. `after`: as in Pool::swap_out. Throws kOutOfBlocks, and as Pool::copy().
  std::size_t save(const std::byte* keys, std::size_t n, std::span<const Address> from, const CallerStream& after);
  // Copies the blocks stored from the first key on into active HBM blocks of the caller, one for each key. Returns how
  // many; the rest of `into` is not touched. Throws as Pool::copy().
  std::size_t load(const std::byte* keys, std::size_t n, std::span<const Address> into, const CallerStream& after);

  // The same from and into memory of the caller: n rows of block_bytes(), each the content of a block in the order of
  // the layout's pieces. Throws kUnsupported when the pool's memory is in other processes.
  std::size_t save_rows(const std::byte* keys, std::size_t n, const std::byte* rows);
  std::size_t load_rows(const std::byte* keys, std::size_t n, std::byte* rows);

  // Both give the blocks back to the pool and return how many. forget() throws kState, and forgets nothing, when one of
  // the keys is pinned.
  std::size_t forget(const std::byte* keys, std::size_t n);
  std::size_t evict(std::size_t n);

  // Gives all blocks back, those that are pinned when the pins go. Every verb but unpin throws kClosed from now on.
  void close() noexcept;
  // Takes no lock, which another thread may have held when this process was forked.
  bool closed() noexcept;
  void unpin(std::span<KeyedEntry* const> pins) noexcept override;
  KeyedCacheStats stats();
  // Checks the index, G3 as far as the pool says, and G4. Throws kAudit.
  void audit();

 private:
  friend class KeyedFill;
  using Lock = std::unique_lock<std::mutex>;

  Lock lock_open();
  void check_count(std::size_t keys, std::size_t given) const;
  void check_sources(std::span<const Address> from) const;
  std::vector<Address> take(std::size_t n);
  void make_room(std::size_t n);
  std::size_t drop(std::size_t n) noexcept;
  void free_blocks(std::span<const Address> addresses) noexcept;
  void give_up(std::span<const Address> fresh) noexcept;
  std::shared_ptr<Arena> memory_here();
  template <class Copy>
  std::size_t store(const std::byte* keys, std::size_t n, Copy&& copy);
  template <class Copy>
  std::size_t fetch(const std::byte* keys, std::size_t n, Copy&& copy);

  const std::string name_;
  const std::shared_ptr<Pool> pool_;
  const std::size_t blocks_max_;
  CopyThreads copiers_;
  std::mutex mutex_;
  KeyedIndex index_;
  std::vector<Address> dropped_;  // room for what drop() gives back
  std::size_t filling_ = 0;       // blocks that are being filled
  KeyedCacheStats counters_;
  std::atomic<bool> closed_{false};  // set under the lock
};

}  // namespace kvpool
