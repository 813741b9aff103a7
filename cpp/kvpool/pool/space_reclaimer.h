// Makes room among the pools of a space with quotas, in the order that blocks/quotas.h plans: in C++, so that an
// allocation never waits for Python.
//
// The plan counts units. A block needs a run of them (docs/adr/0067), so enough free units need not make room for a
// block. Then the units are walked through, extent after extent (unit_set.h), with a window: the shortest sequence of
// free units and blocks that can be evicted which is long enough for one block more, and costs no model a part of its
// reserve. That is a place. A free run that is longer than a block has places already, so that only what they leave of
// it counts. Where least is lost, what lies in the place is dropped. A block in pieces is lost once, however many of
// them lie there.
//
// Before anything is evicted the places are counted that do not overlap. Each is counted for itself, so with places
// that cost the same block or prompt, or the same model its reserve, the count is too high.
//
// Thread-safety: all of it. One thread at a time makes room. It holds no lock of a pool or of the space when it begins,
// and takes those of the pools that it evicts from.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "kvpool/blocks/block_space.h"
#include "kvpool/blocks/cache_blocks.h"
#include "kvpool/pool/prompt_cache.h"
#include "kvpool/pool/tier_moves.h"

namespace kvpool {

class SpaceReclaimer final : public PressureHook {
 public:
  // A pool of the space. leave() waits until nothing is evicted from it any more.
  void enter(CacheBlocks& blocks, PromptCache& cache, TierMoves& moves);
  void leave(std::uint32_t number) noexcept;

  // Evicts until `starved` can take n blocks. Throws kOutOfBlocks: with kQuota when the quotas do not admit it, else
  // with `fragmented` and `largest_run`, in units, when no more blocks of this size can be made. It has evicted nothing
  // if fewer than n places have only blocks in them that could go; otherwise it may have.
  void relieve(const CacheBlocks& starved, MediumChoice medium, std::size_t n) override;

 private:
  // Before others get the lock: places that are compared, and extents that are looked at, with what continues them. One
  // hold sees at least all extents of a place, however many they are.
  static constexpr std::uint32_t kPlacesMax = 1024;
  static constexpr std::size_t kVisitsMax = 4096;
  static constexpr std::uint32_t kDropMax = 256;  // blocks that one place may cost a prompt

  struct Member {
    CacheBlocks* blocks = nullptr;
    PromptCache* cache = nullptr;
    TierMoves* moves = nullptr;
  };
  struct Place;
  class Window;

  std::optional<QuotaRoom> plan(const CacheBlocks& starved, Medium medium, std::size_t n, bool& done) const;
  void wait_for_moves();
  std::size_t evict(const QuotaRoom& room, Medium medium);
  std::size_t evict_from(const Member& member, Medium medium, std::size_t blocks, std::size_t swapped);
  std::size_t make_places(const CacheBlocks& starved, Medium medium, std::size_t n);
  bool enough_places(const CacheBlocks& starved, Medium medium, std::size_t n) const;
  std::uint32_t count_places(const CacheBlocks& starved, Medium medium, std::uint32_t from, std::size_t wanted,
                             std::size_t& found) const;
  static std::size_t places_missing(const CacheBlocks& starved, Medium medium, std::size_t n) noexcept;
  const Member* owner_of(const UnitExtent& extent) const noexcept;
  bool price(const CacheBlocks& starved, Medium medium, const QuotaTier& tier, Place& place,
             std::size_t& visited) const;
  std::uint32_t find_places(const CacheBlocks& starved, Medium medium, std::uint32_t from,
                            std::vector<Place>& places) const;
  std::size_t clear(const CacheBlocks& starved, Medium medium, const Place& place);
  [[noreturn]] void throw_fragmented(const CacheBlocks& starved, Medium medium, std::size_t n) const;

  std::mutex mutex_;
  std::array<Member, BlockSpace::kCachesMax> members_{};  // by number
};

}  // namespace kvpool
