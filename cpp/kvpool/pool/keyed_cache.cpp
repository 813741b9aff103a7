#include "kvpool/pool/keyed_cache.h"

#include <algorithm>
#include <string>
#include <utility>

#include "kvpool/arena/arena.h"
#include "kvpool/base/error.h"
#include "kvpool/blocks/device_mover.h"
#include "kvpool/index/shared_keyed_index.h"
#include "kvpool/pool/keyed_fill.h"

namespace kvpool {
namespace {

constexpr int kRowThreads = 2;

std::size_t checked_blocks_max(std::size_t blocks, const Pool& pool) {
  const std::size_t dram = pool.capacity(Medium::kDram);
  if (blocks >= 1 && blocks <= dram) return blocks;
  throw Error(ErrorCode::kArgument,
              "a keyed cache of " + std::to_string(blocks) + " blocks, and the pool has " + std::to_string(dram) +
                  " blocks in DRAM: it takes 1 to so many",
              {{"value", static_cast<std::int64_t>(blocks)}, {"maximum", static_cast<std::int64_t>(dram)}});
}

// The pieces of a block in the arena, and of its row in the caller's memory: visit(in arena, offset in row, bytes).
template <class Visit>
void for_each_piece(const Arena& arena, Address address, Visit&& visit) {
  std::size_t offset = 0;
  for (const Segment& segment : arena.segments()) {
    visit(segment.base + block_of(address) * segment.stride, offset, segment.bytes);
    offset += segment.bytes;
  }
}

}  // namespace

KeyedCache::KeyedCache(std::shared_ptr<Pool> pool, std::size_t key_bytes, std::size_t blocks_max, std::string name)
    : name_(std::move(name)),
      pool_(std::move(pool)),
      blocks_max_(checked_blocks_max(blocks_max, *pool_)),
      copiers_(pool_->executor(), kRowThreads),
      index_(key_bytes),
      dropped_(blocks_max_) {
  pool_->guard();
  pool_->check_whole("a keyed cache");
}

KeyedCache::~KeyedCache() { close(); }

// --- lookups ---

KeyedCache::Lock KeyedCache::lock_open() {
  pool_->guard();
  Lock lock(mutex_);
  if (closed_) throw Error(ErrorCode::kClosed, "the keyed cache is closed");
  return lock;
}

std::size_t KeyedCache::exists(const std::byte* keys, std::size_t n, bool* stored) {
  const Lock lock = lock_open();
  return index_.exists(keys, n, stored);
}

KeyedIndex::Hit KeyedCache::match(const std::byte* keys, std::size_t n, bool every, std::vector<KeyedEntry*>& pins,
                                  Address* addresses, bool* stored) {
  const Lock lock = lock_open();
  const KeyedIndex::Hit hit = index_.get(keys, n, every, pins, addresses, stored);
  counters_.found_blocks += hit.found;
  counters_.missed_blocks += n - hit.found;
  return hit;
}

// What a peer asks for is no use of this pool's application. And a closed cache is one that is not there: the peer
// would hear kClosed as the loss of this pool.
KeyedIndex::Hit KeyedCache::match_for_peer(const std::byte* keys, std::size_t n, bool every,
                                           std::vector<KeyedEntry*>& pins, Address* addresses, bool* stored) {
  pool_->guard();
  const Lock lock(mutex_);
  if (closed_) throw Error(ErrorCode::kState, "the peer has closed the keyed cache");
  return index_.get(keys, n, every, pins, addresses, stored);
}

// --- room ---

void KeyedCache::check_count(std::size_t keys, std::size_t given) const {
  if (keys == given) return;
  throw Error(ErrorCode::kArgument, std::to_string(keys) + " keys, and " + std::to_string(given) + " blocks",
              {{"needed", static_cast<std::int64_t>(keys)}, {"given", static_cast<std::int64_t>(given)}});
}

// Blocks of the pool. If one is refused, nothing can be done: the pool is closed, or somebody else has freed it.
void KeyedCache::free_blocks(std::span<const Address> addresses) noexcept {
  try {
    pool_->free(addresses.data(), addresses.size());
    return;
  } catch (...) {
    if (pool_->closed()) return;
  }
  for (const Address address : addresses) {
    try {
      pool_->free(&address, 1);
    } catch (...) {
      continue;
    }
  }
}

// Gives back up to n blocks, the coldest first. REQUIRES: the lock is held.
std::size_t KeyedCache::drop(std::size_t n) noexcept {
  const std::size_t gone = index_.evict(std::min(n, index_.evictable()), dropped_.data());
  if (gone > 0) free_blocks({dropped_.data(), gone});
  counters_.evicted_blocks += gone;
  return gone;
}

// So that G4 holds with n blocks more.
void KeyedCache::make_room(std::size_t n) {
  const Lock lock = lock_open();
  const std::size_t held = index_.size() + filling_;
  const std::size_t over = held + n > blocks_max_ ? held + n - blocks_max_ : 0;
  if (over > index_.evictable()) {
    throw Error(ErrorCode::kOutOfBlocks,
                std::to_string(n) + " blocks to store in a keyed cache of " + std::to_string(blocks_max_) + ": " +
                    std::to_string(held) + " are stored or being stored, and " + std::to_string(index_.evictable()) +
                    " of them are not pinned",
                {{"requested", static_cast<std::int64_t>(n)},
                 {"free", static_cast<std::int64_t>(blocks_max_ - held)},
                 {"evictable", static_cast<std::int64_t>(index_.evictable())}});
  }
  drop(over);
  filling_ += n;
}

// n blocks that are counted as being filled.
std::vector<Address> KeyedCache::take(std::size_t n) {
  std::vector<Address> fresh(n);
  make_room(n);
  try {
    try {
      pool_->alloc_evicting(n, Medium::kDram, fresh.data());
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kOutOfBlocks) throw;
      std::size_t gone = 0;
      {
        const Lock lock = lock_open();
        if (index_.evictable() > 0) gone = drop(n);
      }
      if (gone == 0) throw;
      pool_->alloc_evicting(n, Medium::kDram, fresh.data());
    }
  } catch (...) {
    const std::lock_guard lock(mutex_);
    filling_ -= n;
    throw;
  }
  return fresh;
}

// --- copies ---

// copy(positions, fresh): fills fresh[i] with what belongs under the key at positions[i].
template <class Copy>
std::size_t KeyedCache::store(const std::byte* keys, std::size_t n, Copy&& copy) {
  KeyedFill fill(shared_from_this(), keys, n);
  if (!fill.positions().empty()) copy(fill.positions(), fill.addresses());
  const std::size_t added = fill.commit();
  const std::lock_guard lock(mutex_);
  counters_.duplicate_blocks += n - added;
  return added;
}

// Blocks that were being filled, and are not stored. Those that a peer may still write are refused, and come back to
// the pool by themselves.
void KeyedCache::give_up(std::span<const Address> fresh) noexcept {
  if (fresh.empty()) return;
  try {
    pool_->guard_process();
  } catch (...) {
    return;  // another thread of the parent may hold the lock
  }
  const std::lock_guard lock(mutex_);
  filling_ -= fresh.size();
  free_blocks(fresh);
}

// copy(addresses): of the blocks that are stored from the first key on.
template <class Copy>
std::size_t KeyedCache::fetch(const std::byte* keys, std::size_t n, Copy&& copy) {
  std::vector<KeyedEntry*> pinned;
  std::vector<Address> addresses(n);
  const KeyedIndex::Hit hit = match(keys, n, /*every=*/false, pinned, addresses.data(), nullptr);
  const KeyPins held(shared_from_this(), std::move(pinned));
  addresses.resize(hit.first);
  if (hit.first > 0) copy(std::span<const Address>(addresses));
  return hit.first;
}

// Before room is made for what could not be copied anyway.
void KeyedCache::check_sources(std::span<const Address> from) const {
  pool_->check_active(from);
  for (std::size_t i = 0; i < from.size(); ++i) {
    if (medium_of(from[i]) == Medium::kHbm) continue;
    throw Error(ErrorCode::kArgument,
                "address " + std::to_string(from[i]) + " (position " + std::to_string(i) + ") is not in HBM",
                {{"address", static_cast<std::int64_t>(from[i])}, {"position", static_cast<std::int64_t>(i)}});
  }
}

std::size_t KeyedCache::save(const std::byte* keys, std::size_t n, std::span<const Address> from,
                             const CallerStream& after) {
  check_count(n, from.size());
  check_sources(from);
  return store(keys, n, [&](const std::vector<std::size_t>& positions, const std::vector<Address>& fresh) {
    std::vector<Address> sources;
    sources.reserve(positions.size());
    for (const std::size_t position : positions) sources.push_back(from[position]);
    pool_->copy(TierWay::kOut, sources, fresh, after);
  });
}

std::size_t KeyedCache::load(const std::byte* keys, std::size_t n, std::span<const Address> into,
                             const CallerStream& after) {
  check_count(n, into.size());
  return fetch(keys, n, [&](std::span<const Address> addresses) {
    pool_->copy(TierWay::kIn, addresses, into.first(addresses.size()), after);
  });
}

std::shared_ptr<Arena> KeyedCache::memory_here() {
  if (pool_->sharding()) {
    throw Error(ErrorCode::kUnsupported, "the memory of this pool's blocks is in the processes of its ranks");
  }
  return pool_->arena(Medium::kDram);
}

std::size_t KeyedCache::save_rows(const std::byte* keys, std::size_t n, const std::byte* rows) {
  const std::shared_ptr<Arena> arena = memory_here();
  const std::size_t row_bytes = block_bytes();
  return store(keys, n, [&](const std::vector<std::size_t>& positions, const std::vector<Address>& fresh) {
    std::vector<CopyPiece> pieces;
    pieces.reserve(fresh.size() * arena->segments().size());
    for (std::size_t i = 0; i < fresh.size(); ++i) {
      for_each_piece(*arena, fresh[i], [&](std::byte* at, std::size_t offset, std::size_t bytes) {
        pieces.push_back({at, rows + positions[i] * row_bytes + offset, bytes});
      });
    }
    copiers_.team().run(pieces);
  });
}

std::size_t KeyedCache::load_rows(const std::byte* keys, std::size_t n, std::byte* rows) {
  const std::shared_ptr<Arena> arena = memory_here();
  const std::size_t row_bytes = block_bytes();
  return fetch(keys, n, [&](std::span<const Address> addresses) {
    std::vector<CopyPiece> pieces;
    pieces.reserve(addresses.size() * arena->segments().size());
    for (std::size_t i = 0; i < addresses.size(); ++i) {
      for_each_piece(*arena, addresses[i], [&](const std::byte* at, std::size_t offset, std::size_t bytes) {
        pieces.push_back({rows + i * row_bytes + offset, at, bytes});
      });
    }
    copiers_.team().run(pieces);
  });
}

// --- what goes ---

std::size_t KeyedCache::forget(const std::byte* keys, std::size_t n) {
  std::vector<Address> gone(n);
  const Lock lock = lock_open();
  const KeyedIndex::Forgotten forgotten = index_.forget(keys, n, gone.data());
  if (forgotten.pinned > 0) throw_pinned_keys(forgotten.pinned);
  if (forgotten.removed > 0) free_blocks({gone.data(), forgotten.removed});
  return forgotten.removed;
}

std::size_t KeyedCache::evict(std::size_t n) {
  const Lock lock = lock_open();
  return drop(n);
}

void KeyedCache::close() noexcept {
  try {
    pool_->guard_process();
  } catch (...) {
    return;  // another thread of the parent may hold the lock
  }
  const std::lock_guard lock(mutex_);
  closed_ = true;
  drop(index_.evictable());
}

bool KeyedCache::closed() noexcept { return closed_.load(std::memory_order_relaxed); }

void KeyedCache::unpin(std::span<KeyedEntry* const> pins) noexcept {
  try {
    pool_->guard_process();
  } catch (...) {
    return;
  }
  const std::lock_guard lock(mutex_);
  index_.unpin(pins);
  if (closed_) drop(index_.evictable());
}

KeyedCacheStats KeyedCache::stats() {
  pool_->guard_open();
  const std::lock_guard lock(mutex_);
  KeyedCacheStats stats = counters_;
  stats.blocks = index_.size();
  stats.evictable = index_.evictable();
  stats.blocks_max = blocks_max_;
  stats.index_bytes = index_.bytes();
  return stats;
}

void KeyedCache::audit() {
  const Lock lock = lock_open();
  index_.audit();
  if (index_.size() + filling_ > blocks_max_)
    throw Error(ErrorCode::kAudit, "keyed cache: more blocks than it may have");
  index_.for_each([&](Address address) {
    try {
      pool_->check_active({&address, 1});
    } catch (const Error& error) {
      throw Error(ErrorCode::kAudit, std::string("keyed cache: a block is not its own: ") + error.what());
    }
  });
}

}  // namespace kvpool
