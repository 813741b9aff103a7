// The memory of a pool's blocks: an arena for each medium, and the copies between them.
//
// Thread-safety: all of it, but copy() is called by one thread at a time for each way, and set_mover() and release()
// while nobody copies: TierMoves sees to that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "kvpool/arena/arena.h"
#include "kvpool/base/copy.h"
#include "kvpool/blocks/block_copy.h"
#include "kvpool/blocks/layout.h"
#include "kvpool/cuda/stream.h"
#include "kvpool/pool/pool_guard.h"
#include "kvpool/pool/pool_options.h"
#include "kvpool/pool/tier_mover.h"

namespace kvpool {

class DeviceMover;
class DeviceOrder;
enum class TierWay : std::uint8_t;

class PoolMemory {
 public:
  using Arenas = MediumMap<std::shared_ptr<Arena>>;

  // Keeps the memory mapped. To let go of adopted memory may wait for Python: nobody does that with a lock held.
  struct Kept {
    Arenas arenas;
    std::shared_ptr<DeviceMover> mover;
  };

  // The arenas that a pool with these options has. Throws kArgument, kOutOfMemory, kUnsupported, kLayoutMismatch.
  static Arenas make_arenas(const PoolOptions& options);
  // Tells `guard` when the GPU is lost. Throws kOutOfMemory, kUnsupported.
  PoolMemory(const PoolOptions& options, Arenas arenas, PoolGuard& guard);
  PoolMemory(const PoolMemory&) = delete;
  PoolMemory& operator=(const PoolMemory&) = delete;

  const Layout& layout() const noexcept { return layout_; }
  const std::optional<Sharding>& sharding() const noexcept { return sharding_; }
  // Whether HBM is on a GPU: then the CPU may not follow its addresses.
  bool on_device() const noexcept { return on_device_; }
  bool two_tiers() const noexcept { return two_tiers_; }
  std::uint64_t device_bytes() noexcept;  // of a GPU's memory, that this has taken

  // Throw what PoolGuard::check() throws.
  std::shared_ptr<Arena> arena(Medium medium);
  Arenas arenas();
  Kept keep() noexcept;
  // From now on this keeps nothing. REQUIRES: the guard says closed.
  Kept release() noexcept;

  // Fills the blocks with zeros. Throws only where the memory is a GPU's; when that is lost, so is the pool.
  void zero(const Kept& kept, const Address* addresses, std::size_t n);
  // Throws only where the memory is a GPU's; when that is lost, so is the pool.
  void copy(TierWay way, const Address* from, const Address* to, std::size_t n, const CopyOrder& after);
  // Who copies in place of this, since the memory is not here. Null: nobody.
  void set_mover(TierMover* mover) noexcept { mover_ = mover; }

  // Before anything is done for a copy that is to follow this stream. Throws kArgument for a stream of something else,
  // kUnsupported. What is wrong with the stream later, the copy finds.
  void check_stream(const CallerStream& after);
  // What the GPU has been given until now: in that stream, or as a whole. REQUIRES: on_device().
  std::shared_ptr<const DeviceOrder> order_now(const CallerStream& stream);
  // For a transfer that is to follow this stream; null without one. Throws as check_stream().
  std::shared_ptr<const DeviceOrder> order_after(const CallerStream& stream);

 private:
  const Layout layout_;
  const std::optional<Sharding> sharding_;
  const bool on_device_;
  PoolGuard& guard_;
  std::mutex mutex_;  // guards who has the arenas; taken inside every other lock
  Arenas arenas_;
  bool two_tiers_ = false;
  // HBM to DRAM and back, in ordinary memory, or between a GPU and the host.
  std::optional<BlockCopier> out_copier_;
  std::optional<BlockCopier> in_copier_;
  std::shared_ptr<DeviceMover> device_mover_;
  CopyTeam team_;
  TierMover* mover_ = nullptr;
};

}  // namespace kvpool
