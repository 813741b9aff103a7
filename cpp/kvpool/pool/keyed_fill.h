// Blocks of a keyed cache that somebody fills: the caller of a save, or a peer that writes them.
//
// Thread-safety: one thread at a time uses an object. It keeps its cache alive.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "kvpool/base/address.h"
#include "kvpool/index/key_pins.h"
#include "kvpool/pool/keyed_cache.h"

namespace kvpool {

class KeyedFill {
 public:
  // Pins those of the n keys that are stored, so that they are not evicted for what comes, and takes a block for each
  // of the others. Throws kOutOfBlocks, kClosed.
  KeyedFill(std::shared_ptr<KeyedCache> cache, const std::byte* keys, std::size_t n);
  ~KeyedFill() { close(); }
  KeyedFill(KeyedFill&& other) noexcept = default;
  KeyedFill& operator=(KeyedFill&&) = delete;

  // Of the keys that get a block, ascending; of a key that is there twice, the first.
  const std::vector<std::size_t>& positions() const noexcept { return positions_; }
  // Active DRAM blocks of the pool, one for each position.
  const std::vector<Address>& addresses() const noexcept { return fresh_; }

  // Stores the blocks under their keys, and returns how many are new: where another has stored the same key meanwhile,
  // that one stays. REQUIRES: they have their content, and nobody writes them. Throws kClosed, std::bad_alloc; then the
  // blocks are the fill's still.
  std::size_t commit();
  // Gives the blocks back, and releases the pins. REQUIRES: nobody writes them; those that were quarantined come back
  // by themselves. Idempotent.
  void close() noexcept;

 private:
  std::shared_ptr<KeyedCache> cache_;  // null: closed
  std::vector<std::byte> keys_;        // of `positions_`
  std::vector<std::size_t> positions_;
  std::vector<Address> fresh_;
  std::vector<Address> canonical_;   // room for commit()
  std::vector<Address> duplicates_;  // likewise
  KeyPins held_;                     // last: they go first
};

}  // namespace kvpool
