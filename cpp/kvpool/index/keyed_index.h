// The keyed index: which blocks are stored under which keys. For engines that hand over a hash for each block in place
// of the tokens. All keys of an index have one length; each names one block.
//
// Invariants
//   J4  Each entry is in the table exactly once, and no two entries have the same key.
//   J5  An entry is in the order exactly while it is not pinned. The order is that of the last uses: the coldest first.
//   J6  A call uses its keys as a chain: of those that it makes evictable, a later one is colder. So the end of a chain
//       goes before its beginning.
//   J7  A call that throws has changed nothing.
//
// Cost: constant time for each key. An entry takes 32 bytes and its key, rounded up to 8 bytes, and two to three slots
// of 16 bytes in the table. The memory of entries is kept for later ones, and goes with the index.
//
// Thread-safety: none; the owner locks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kvpool/base/address.h"
#include "kvpool/base/key_bytes.h"
#include "kvpool/index/child_table.h"
#include "kvpool/index/key_hash.h"

namespace kvpool {

// The key follows it in memory.
struct KeyedEntry {
  Address value;
  KeyedEntry* warmer;  // in the order; of an unused entry: the next unused one
  KeyedEntry* colder;
  std::uint32_t pins;
  std::uint32_t used;  // 1, or 0: not in the index
};

class KeyedIndex {
 public:
  // Throws Error kArgument unless key_bytes is 8 to 64.
  explicit KeyedIndex(std::size_t key_bytes, const KeySeed& seed = random_key_seed());
  KeyedIndex(const KeyedIndex&) = delete;
  KeyedIndex& operator=(const KeyedIndex&) = delete;

  std::size_t key_bytes() const noexcept { return key_bytes_; }
  std::size_t size() const noexcept { return table_.size(); }
  std::size_t evictable() const noexcept { return evictable_; }
  std::size_t bytes() const noexcept;

  // In all that follows, `keys` are n keys one after another; a key may be there more than once.

  // How many keys from the first on are stored. `stored`, unless it is null, receives a 1 or a 0 for each of the n.
  // Does not count as a use.
  std::size_t exists(const std::byte* keys, std::size_t n, bool* stored) const noexcept;

  struct Hit {
    std::size_t first = 0;  // keys stored from the first on
    std::size_t found = 0;  // keys pinned
  };
  // Pins the stored keys from the first on, or with `every` all that are stored, and adds them to `pins`; one that is
  // there twice is pinned twice. Writes their values to `values`, which has room for n, and to `stored` as exists(),
  // where what is not looked at is 0. Throws std::bad_alloc.
  Hit get(const std::byte* keys, std::size_t n, bool every, std::vector<KeyedEntry*>& pins, Address* values,
          bool* stored);

  // Stores values for keys. A key that is stored keeps its value; `canonical`, which may be `values`, receives the
  // values that are stored now. Counts as a use of all of them. Returns how many are new. Throws std::bad_alloc.
  std::size_t put(const std::byte* keys, std::size_t n, const Address* values, Address* canonical);

  // Releases pins of get(), the last first: J6.
  void unpin(std::span<KeyedEntry* const> pins) noexcept;

  struct Forgotten {
    std::size_t removed = 0;
    std::size_t pinned = 0;  // if not 0, nothing was removed
  };
  // Removes keys; skips those that are not stored. Writes the removed values to `values`, which has room for n.
  Forgotten forget(const std::byte* keys, std::size_t n, Address* values) noexcept;

  // Removes up to n keys, the coldest first. Writes their values to `values`, which has room for min(n, evictable()).
  std::size_t evict(std::size_t n, Address* values) noexcept;

  // visit(value) for every key, in no order.
  template <class Visit>
  void for_each(Visit&& visit) const {
    for_each_entry([&](const KeyedEntry* entry) { visit(entry->value); });
  }

  // Checks J4, J5 and the counters. Throws Error kAudit.
  void audit() const;

 private:
  static constexpr std::size_t kChunkEntries = 256;

  std::uint64_t hash(const std::byte* key) const noexcept { return hash_key(key, key_bytes_, seed_); }
  static std::byte* key_of(KeyedEntry* entry) noexcept { return reinterpret_cast<std::byte*>(entry + 1); }
  KeyedEntry* find(const std::byte* key) const noexcept { return find(key, hash(key)); }
  KeyedEntry* find(const std::byte* key, std::uint64_t hash) const noexcept;
  void reserve(std::size_t n);
  KeyedEntry* add(const std::byte* key, std::uint64_t hash, Address value) noexcept;
  void remove(KeyedEntry* entry) noexcept;
  void enter(KeyedEntry* entry) noexcept;
  void take_out(KeyedEntry* entry) noexcept;
  template <class Visit>
  void for_each_entry(Visit&& visit) const {
    for (const auto& chunk : chunks_) {
      for (std::size_t i = 0; i < kChunkEntries; ++i) {
        auto* const entry = reinterpret_cast<KeyedEntry*>(chunk.get() + i * entry_bytes_);
        if (entry->used != 0) visit(entry);
      }
    }
  }

  const std::size_t key_bytes_;
  const std::size_t entry_bytes_;
  const KeySeed seed_;
  ChildTable<KeyedEntry> table_;
  std::vector<std::unique_ptr<std::byte[]>> chunks_;  // NOLINT(modernize-avoid-c-arrays)
  KeyedEntry* unused_ = nullptr;
  std::size_t unused_count_ = 0;
  KeyedEntry* warmest_ = nullptr;  // J5
  KeyedEntry* coldest_ = nullptr;
  std::size_t evictable_ = 0;
};

}  // namespace kvpool
