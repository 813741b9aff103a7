#include "kvpool/index/keyed_index.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "kvpool/base/error.h"

namespace kvpool {
namespace {

std::size_t checked_key_bytes(std::size_t bytes) {
  if (bytes >= kKeyBytesMin && bytes <= kKeyBytesMax) return bytes;
  throw Error(ErrorCode::kArgument,
              "key_bytes must be " + std::to_string(kKeyBytesMin) + " to " + std::to_string(kKeyBytesMax) +
                  ", and is " + std::to_string(bytes),
              {{"value", static_cast<std::int64_t>(bytes)}});
}

[[noreturn]] void throw_broken(const char* what) {
  throw Error(ErrorCode::kAudit, std::string("keyed index: ") + what);
}

}  // namespace

KeyedIndex::KeyedIndex(std::size_t key_bytes, const KeySeed& seed)
    : key_bytes_(checked_key_bytes(key_bytes)),
      entry_bytes_(sizeof(KeyedEntry) + (key_bytes + 7) / 8 * 8),
      seed_(seed) {}

std::size_t KeyedIndex::bytes() const noexcept {
  return sizeof *this + chunks_.size() * kChunkEntries * entry_bytes_ + chunks_.capacity() * sizeof(chunks_.front()) +
         table_.bytes();
}

KeyedEntry* KeyedIndex::find(const std::byte* key, std::uint64_t hash) const noexcept {
  return table_.find(hash, [&](KeyedEntry* entry) { return std::memcmp(key_of(entry), key, key_bytes_) == 0; });
}

std::size_t KeyedIndex::exists(const std::byte* keys, std::size_t n, bool* stored) const noexcept {
  std::size_t first = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const bool there = find(keys + i * key_bytes_) != nullptr;
    if (stored != nullptr) stored[i] = there;
    if (there && first == i) ++first;
    if (!there && stored == nullptr) break;
  }
  return first;
}

KeyedIndex::Hit KeyedIndex::get(const std::byte* keys, std::size_t n, bool every, std::vector<KeyedEntry*>& pins,
                                Address* values, bool* stored) {
  pins.reserve(pins.size() + n);
  if (stored != nullptr) std::fill_n(stored, n, false);
  Hit hit;
  for (std::size_t i = 0; i < n; ++i) {
    KeyedEntry* const entry = find(keys + i * key_bytes_);
    if (entry == nullptr) {
      if (!every) break;
      continue;
    }
    if (entry->pins++ == 0) take_out(entry);
    pins.push_back(entry);
    values[hit.found++] = entry->value;
    if (stored != nullptr) stored[i] = true;
    if (hit.first == i) ++hit.first;
  }
  return hit;
}

std::size_t KeyedIndex::put(const std::byte* keys, std::size_t n, const Address* values, Address* canonical) {
  std::vector<KeyedEntry*> used;
  used.reserve(n);
  reserve(n);
  std::size_t added = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const std::byte* const key = keys + i * key_bytes_;
    const std::uint64_t hashed = hash(key);
    KeyedEntry* entry = find(key, hashed);
    if (entry == nullptr) {
      entry = add(key, hashed, values[i]);
      ++added;
    }
    canonical[i] = entry->value;
    used.push_back(entry);
  }
  for (std::size_t i = n; i-- > 0;) {  // J6
    if (used[i]->pins > 0) continue;
    take_out(used[i]);
    enter(used[i]);
  }
  return added;
}

void KeyedIndex::unpin(std::span<KeyedEntry* const> pins) noexcept {
  for (std::size_t i = pins.size(); i-- > 0;) {
    if (--pins[i]->pins == 0) enter(pins[i]);
  }
}

KeyedIndex::Forgotten KeyedIndex::forget(const std::byte* keys, std::size_t n, Address* values) noexcept {
  Forgotten forgotten;
  for (std::size_t i = 0; i < n; ++i) {
    const KeyedEntry* const entry = find(keys + i * key_bytes_);
    if (entry != nullptr && entry->pins > 0) ++forgotten.pinned;
  }
  if (forgotten.pinned > 0) return forgotten;
  for (std::size_t i = 0; i < n; ++i) {
    KeyedEntry* const entry = find(keys + i * key_bytes_);
    if (entry == nullptr) continue;  // never stored, or named before
    values[forgotten.removed++] = entry->value;
    remove(entry);
  }
  return forgotten;
}

std::size_t KeyedIndex::evict(std::size_t n, Address* values) noexcept {
  std::size_t gone = 0;
  for (; gone < n && coldest_ != nullptr; ++gone) {
    values[gone] = coldest_->value;
    remove(coldest_);
  }
  return gone;
}

// Makes room for n entries more.
void KeyedIndex::reserve(std::size_t n) {
  table_.reserve(n);
  while (unused_count_ < n) {
    if (chunks_.size() == chunks_.capacity()) chunks_.reserve(std::max<std::size_t>(8, chunks_.capacity() * 2));
    auto chunk = std::make_unique_for_overwrite<std::byte[]>(kChunkEntries * entry_bytes_);
    for (std::size_t i = kChunkEntries; i-- > 0;) {
      auto* const entry = new (chunk.get() + i * entry_bytes_) KeyedEntry{};
      entry->warmer = unused_;
      unused_ = entry;
    }
    unused_count_ += kChunkEntries;
    chunks_.push_back(std::move(chunk));
  }
}

// REQUIRES: reserve() made room; the key is not there.
KeyedEntry* KeyedIndex::add(const std::byte* key, std::uint64_t hash, Address value) noexcept {
  KeyedEntry* const entry = unused_;
  unused_ = entry->warmer;
  --unused_count_;
  *entry = KeyedEntry{value, nullptr, nullptr, 0, 1};
  std::memcpy(key_of(entry), key, key_bytes_);
  table_.insert(hash, entry);
  enter(entry);
  return entry;
}

// REQUIRES: it is not pinned.
void KeyedIndex::remove(KeyedEntry* entry) noexcept {
  table_.erase(hash(key_of(entry)), entry);
  take_out(entry);
  entry->used = 0;
  entry->warmer = unused_;
  unused_ = entry;
  ++unused_count_;
}

// Makes it the warmest.
void KeyedIndex::enter(KeyedEntry* entry) noexcept {
  entry->warmer = nullptr;
  entry->colder = warmest_;
  (warmest_ != nullptr ? warmest_->warmer : coldest_) = entry;
  warmest_ = entry;
  ++evictable_;
}

void KeyedIndex::take_out(KeyedEntry* entry) noexcept {
  (entry->warmer != nullptr ? entry->warmer->colder : warmest_) = entry->colder;
  (entry->colder != nullptr ? entry->colder->warmer : coldest_) = entry->warmer;
  --evictable_;
}

void KeyedIndex::audit() const {
  std::size_t entries = 0;
  std::size_t unpinned = 0;
  for_each_entry([&](KeyedEntry* entry) {
    ++entries;
    if (entry->pins == 0) ++unpinned;
    if (find(key_of(entry)) != entry) throw_broken("an entry is not found under its key");
  });
  if (entries != table_.size()) throw_broken("the table has other entries than there are");
  if (entries + unused_count_ != chunks_.size() * kChunkEntries) throw_broken("entries are lost");
  std::size_t ordered = 0;
  const KeyedEntry* warmer = nullptr;
  for (const KeyedEntry* entry = warmest_; entry != nullptr; entry = entry->colder) {
    if (entry->used == 0 || entry->pins > 0) throw_broken("the order has an entry that is pinned or gone");
    if (entry->warmer != warmer) throw_broken("the order's links do not fit");
    if (++ordered > entries) throw_broken("the order does not end");
    warmer = entry;
  }
  if (warmer != coldest_ || ordered != unpinned || ordered != evictable_) throw_broken("the order lacks entries");
}

}  // namespace kvpool
