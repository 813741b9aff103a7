#include "kvpool/pool/keyed_fill.h"

#include <algorithm>
#include <mutex>
#include <string_view>
#include <utility>

namespace kvpool {
namespace {

// The positions of the keys that are not stored, ascending; of a key that stands there twice, the first.
std::vector<std::size_t> first_of_each(const std::byte* keys, std::size_t key_bytes, std::size_t n,
                                       const bool* stored) {
  const auto key_at = [&](std::size_t i) {
    return std::string_view(reinterpret_cast<const char*>(keys + i * key_bytes), key_bytes);
  };
  std::vector<std::size_t> positions;
  for (std::size_t i = 0; i < n; ++i) {
    if (!stored[i]) positions.push_back(i);
  }
  std::sort(positions.begin(), positions.end(), [&](std::size_t left, std::size_t right) {
    const int order = key_at(left).compare(key_at(right));
    return order < 0 || (order == 0 && left < right);
  });
  const auto end = std::unique(positions.begin(), positions.end(),
                               [&](std::size_t left, std::size_t right) { return key_at(left) == key_at(right); });
  positions.erase(end, positions.end());
  std::sort(positions.begin(), positions.end());
  return positions;
}

}  // namespace

KeyedFill::KeyedFill(std::shared_ptr<KeyedCache> cache, const std::byte* keys, std::size_t n) {
  std::vector<KeyedEntry*> pinned;
  std::vector<Address> addresses(n);
  const std::unique_ptr<bool[]> stored(new bool[n]);  // NOLINT(modernize-avoid-c-arrays)
  {
    const KeyedCache::Lock lock = cache->lock_open();
    cache->index_.get(keys, n, /*every=*/true, pinned, addresses.data(), stored.get());
  }
  held_ = KeyPins(cache, std::move(pinned));
  const std::size_t key_bytes = cache->key_bytes();
  positions_ = first_of_each(keys, key_bytes, n, stored.get());
  for (const std::size_t i : positions_) keys_.insert(keys_.end(), keys + i * key_bytes, keys + (i + 1) * key_bytes);
  canonical_.resize(positions_.size());
  duplicates_.reserve(positions_.size());
  if (!positions_.empty()) fresh_ = cache->take(positions_.size());
  cache_ = std::move(cache);
}

std::size_t KeyedFill::commit() {
  const std::size_t m = fresh_.size();
  if (m == 0 || cache_ == nullptr) return 0;
  const KeyedCache::Lock lock = cache_->lock_open();
  const std::size_t added = cache_->index_.put(keys_.data(), m, fresh_.data(), canonical_.data());
  cache_->filling_ -= m;
  for (std::size_t i = 0; i < m; ++i) {
    if (canonical_[i] != fresh_[i]) duplicates_.push_back(fresh_[i]);
  }
  if (!duplicates_.empty()) cache_->free_blocks(duplicates_);
  cache_->counters_.saved_blocks += added;
  fresh_.clear();
  return added;
}

void KeyedFill::close() noexcept {
  const std::shared_ptr<KeyedCache> cache = std::move(cache_);
  cache_.reset();
  if (cache == nullptr) return;
  held_.release();
  cache->give_up(fresh_);
  fresh_.clear();
}

}  // namespace kvpool
