// A keyed index used alone: opaque values, its own lock, pins that can outlive every other reference.
#pragma once

#include <algorithm>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "kvpool/base/error.h"
#include "kvpool/index/key_pins.h"
#include "kvpool/index/keyed_index.h"

namespace kvpool {

struct SharedKeyedStats {
  std::size_t keys;
  std::size_t evictable;
  std::size_t bytes;
};

// Throws kState: keys that were to be forgotten are pinned.
[[noreturn]] inline void throw_pinned_keys(std::size_t pinned) {
  throw Error(ErrorCode::kState, std::to_string(pinned) + " of the keys to forget are pinned: nothing was forgotten",
              {{"pinned", static_cast<std::int64_t>(pinned)}});
}

// Thread-safe. Errors: std::bad_alloc changes nothing; forget() throws Error kState when a key to remove is pinned.
// Documented in KeyedIndex.
class SharedKeyedIndex final : public KeyPinOwner {
 public:
  explicit SharedKeyedIndex(std::size_t key_bytes) : index_(key_bytes) {}

  std::size_t key_bytes() const noexcept { return index_.key_bytes(); }
  std::size_t exists(const std::byte* keys, std::size_t n, bool* stored) {
    const std::lock_guard lock(mutex_);
    return index_.exists(keys, n, stored);
  }
  KeyedIndex::Hit get(const std::byte* keys, std::size_t n, bool every, std::vector<KeyedEntry*>& pins, Address* values,
                      bool* stored) {
    const std::lock_guard lock(mutex_);
    return index_.get(keys, n, every, pins, values, stored);
  }
  std::size_t put(const std::byte* keys, std::size_t n, const Address* values, Address* canonical) {
    const std::lock_guard lock(mutex_);
    return index_.put(keys, n, values, canonical);
  }
  std::vector<Address> forget(const std::byte* keys, std::size_t n) {
    std::vector<Address> gone(n);
    const std::lock_guard lock(mutex_);
    const KeyedIndex::Forgotten forgotten = index_.forget(keys, n, gone.data());
    if (forgotten.pinned > 0) throw_pinned_keys(forgotten.pinned);
    gone.resize(forgotten.removed);
    return gone;
  }
  std::vector<Address> evict(std::size_t n) {
    const std::lock_guard lock(mutex_);
    std::vector<Address> gone(std::min(n, index_.evictable()));
    index_.evict(gone.size(), gone.data());
    return gone;
  }
  void unpin(std::span<KeyedEntry* const> pins) noexcept override {
    const std::lock_guard lock(mutex_);
    index_.unpin(pins);
  }
  SharedKeyedStats stats() {
    const std::lock_guard lock(mutex_);
    return {index_.size(), index_.evictable(), index_.bytes()};
  }
  void audit() {
    const std::lock_guard lock(mutex_);
    index_.audit();
  }

 private:
  std::mutex mutex_;
  KeyedIndex index_;
};

}  // namespace kvpool
