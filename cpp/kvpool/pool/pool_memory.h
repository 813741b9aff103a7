// The memory of a pool's blocks: an arena for each medium, and the copies between them.
//
// Thread-safety: all of it, except that one thread at a time may call copy() for each direction, and set_mover() and
// release() must not run during a copy: TierMoves ensures that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "kvpool/arena/arena.h"
#include "kvpool/blocks/block_copy.h"
#include "kvpool/blocks/layout.h"
#include "kvpool/cuda/stream.h"
#include "kvpool/exec/copy_threads.h"
#include "kvpool/pool/pool_guard.h"
#include "kvpool/pool/pool_options.h"
#include "kvpool/pool/tier_mover.h"

namespace kvpool {

class CacheBlocks;
class DeviceMover;
class DeviceOrder;
enum class TierWay : std::uint8_t;

class PoolMemory {
 public:
  using Arenas = MediumMap<std::shared_ptr<Arena>>;

  // Keeps the memory mapped. Releasing adopted memory may wait for Python, so do it without a lock.
  struct Kept {
    Arenas arenas;
    std::shared_ptr<DeviceMover> mover;
  };

  // Makes the arenas of a pool with these options. Throws kArgument, kOutOfMemory, kUnsupported, kLayoutMismatch.
  static Arenas make_arenas(const PoolOptions& options);
  // Tells `guard` when the GPU is lost. The executor outlives it. Throws kOutOfMemory, kUnsupported.
  PoolMemory(const PoolOptions& options, Arenas arenas, PoolGuard& guard, Executor& executor);
  PoolMemory(const PoolMemory&) = delete;
  PoolMemory& operator=(const PoolMemory&) = delete;

  const Layout& layout() const noexcept { return layout_; }
  const std::optional<Sharding>& sharding() const noexcept { return sharding_; }
  // Whether HBM is on a GPU: then the CPU may not dereference its addresses.
  bool on_device() const noexcept { return on_device_; }
  bool two_tiers() const noexcept { return two_tiers_; }
  std::uint64_t device_bytes() noexcept;  // GPU memory that this has allocated

  // Throw what PoolGuard::check() throws.
  std::shared_ptr<Arena> arena(Medium medium);
  Arenas arenas();
  Kept keep() noexcept;
  // Gives up the arenas. REQUIRES: the guard is closed.
  Kept release() noexcept;

  // Fills the blocks with zeros. Throws only for GPU memory; if the GPU is lost, the pool fails.
  void zero(const Kept& kept, const Address* addresses, std::size_t n);
  // Throws only for GPU memory; if the GPU is lost, the pool fails.
  void copy(TierWay way, const Address* from, const Address* to, std::size_t n, const CopyOrder& after);
  // From now on blocks may lie in pieces, as `blocks` says, which outlives all copies. REQUIRES: the arenas are views
  // of units; no copy yet.
  void set_pieces(const CacheBlocks& blocks);
  // Sets the mover that copies instead of this, since the memory is in other processes. Null: none.
  void set_mover(TierMover* mover) noexcept { mover_ = mover; }

  // Checks the stream of a verb before anything is done. Throws kArgument for a stream of another device, kUnsupported.
  // The copy reports later errors of the stream.
  void check_stream(const CallerStream& after);
  // The work that the GPU has been given so far, in that stream or in all. REQUIRES: on_device().
  std::shared_ptr<const DeviceOrder> order_now(const CallerStream& stream);
  // What has to end before content that the stream's work so far, or without a stream all work, may still write is
  // read. Null when that is nothing: the memory is not on a GPU. Throws as check_stream().
  std::shared_ptr<const DeviceOrder> order_of_content(const CallerStream& stream);
  // The order of a transfer after this stream; null without a stream. Throws as check_stream().
  std::shared_ptr<const DeviceOrder> order_after(const CallerStream& stream);

 private:
  const Layout layout_;
  const std::optional<Sharding> sharding_;
  const bool on_device_;
  PoolGuard& guard_;
  std::mutex mutex_;  // guards the references to the arenas; taken inside every other lock
  Arenas arenas_;
  bool two_tiers_ = false;
  // HBM to DRAM and back, in ordinary memory, or between a GPU and the host.
  std::optional<BlockCopier> out_copier_;
  std::optional<BlockCopier> in_copier_;
  // In their place when blocks may lie in pieces.
  const CacheBlocks* in_pieces_ = nullptr;
  std::optional<PieceCopier> out_piece_copier_;
  std::optional<PieceCopier> in_piece_copier_;
  std::shared_ptr<DeviceMover> device_mover_;
  CopyThreads copiers_;
  TierMover* mover_ = nullptr;
};

}  // namespace kvpool
