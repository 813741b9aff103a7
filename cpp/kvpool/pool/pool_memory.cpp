#include "kvpool/pool/pool_memory.h"

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "kvpool/arena/device_arena.h"
#include "kvpool/base/error.h"
#include "kvpool/blocks/adopted_pages.h"
#include "kvpool/blocks/cache_blocks.h"
#include "kvpool/blocks/device_mover.h"
#include "kvpool/cuda/copier.h"
#include "kvpool/cuda/order.h"
#include "kvpool/pool/gpu_call.h"

namespace kvpool {
namespace {

constexpr std::int64_t kRanksRetryAfterUs = 100'000;  // processes that start

std::shared_ptr<Arena> make_arena(const PoolOptions& options, Medium medium, std::uint32_t blocks) {
  if (options.sharding) return make_absent_arena(medium, blocks, options.layout.block_bytes());
  ArenaOptions arena;
  arena.medium = medium;
  arena.blocks = blocks;
  arena.segment_bytes = options.layout.segment_bytes();
  arena.huge_pages = options.huge_pages;
  arena.numa_node = options.numa_node;
  arena.check_memory = options.check_memory;
  arena.pin = medium == Medium::kDram && options.pin_dram;
  arena.pin_device = options.hbm_device();
  arena.label = medium == Medium::kHbm ? "kvpool-hbm" : "kvpool-dram";
  arena.commit_threads = options.copy_threads;
  return make_owned_arena(arena);
}

// Every segment must hold whole pieces of the layout, in its order: a layer's K, or a layer's K and V, and so on.
void check_pieces(const Arena& arena, const Layout& layout) {
  const auto fail = [&](const std::string& what) {
    throw Error(ErrorCode::kLayoutMismatch, "the adopted tensors " + what,
                {{"offered_bytes", static_cast<std::int64_t>(arena.block_bytes())},
                 {"layout_bytes", static_cast<std::int64_t>(layout.block_bytes())}});
  };
  if (arena.block_bytes() != layout.block_bytes()) {
    fail("hold " + std::to_string(arena.block_bytes()) + " bytes a block, the layout " +
         std::to_string(layout.block_bytes()));
  }
  std::size_t piece = 0;
  for (std::size_t i = 0; i < arena.segments().size(); ++i) {
    const std::size_t bytes = arena.segments()[i].bytes;
    std::size_t whole = 0;
    while (piece < layout.piece_bytes.size() && whole < bytes) whole += layout.piece_bytes[piece++];
    if (whole != bytes) {
      fail("cut a block where the layout does not: run " + std::to_string(i) + " of it has " + std::to_string(bytes) +
           " bytes, and the layout's pieces there end at " + std::to_string(whole));
    }
  }
}

// The pieces of a block of a space.
void zero_pieces(const Arena& arena, const BlockPieces& pieces, std::uint32_t block) {
  const Segment& units = arena.segments().front();
  const std::size_t bytes = arena.block_bytes() / pieces.pieces();
  for (std::uint32_t piece = 0; piece < pieces.pieces(); ++piece) {
    std::memset(units.base + pieces.unit_of(block, piece) * units.stride, 0, bytes);
  }
}

std::shared_ptr<Arena> make_hbm(const PoolOptions& options) {
  if (!options.adopted_hbm && options.device >= 0) {
    DeviceArenaOptions arena;
    arena.blocks = options.hbm_blocks;
    arena.segment_bytes = options.layout.segment_bytes();
    arena.device = options.device;
    arena.kind = options.device_memory;
    arena.check_memory = options.check_memory;
    return std::make_shared<DeviceArena>(arena);
  }
  if (!options.adopted_hbm) return make_arena(options, Medium::kHbm, options.hbm_blocks);
  const AdoptedMemory& adopted = *options.adopted_hbm;
  auto arena = adopted.device < 0
                   ? make_adopted_arena(Medium::kHbm, adopted.blocks, adopted.segments, adopted.keepalive)
                   : make_adopted_device_arena(Medium::kHbm, adopted.blocks, adopted.segments, adopted.keepalive,
                                               adopted.device);
  check_pieces(*arena, options.layout);
  check_adopted_pages(options.layout, adopted.tensors);
  return arena;
}

}  // namespace

PoolMemory::Arenas PoolMemory::make_arenas(const PoolOptions& options) {
  return {make_hbm(options), make_arena(options, Medium::kDram, options.dram_blocks),
          make_absent_arena(Medium::kDisk, 0, options.layout.block_bytes())};
}

PoolMemory::PoolMemory(const PoolOptions& options, Arenas arenas, PoolGuard& guard, Executor& executor)
    : layout_(options.layout),
      sharding_(options.sharding),
      on_device_(options.hbm_device() >= 0),
      guard_(guard),
      arenas_(std::move(arenas)),
      copiers_(executor, options.copy_threads) {
  const Arena& hbm = *arenas_[Medium::kHbm];
  const Arena& dram = *arenas_[Medium::kDram];
  two_tiers_ = hbm.blocks() > 0 && dram.blocks() > 0;
  if (on_device_) {
    if (hbm.blocks() > 0) device_mover_ = DeviceMover::make(hbm, dram);
  } else if (two_tiers_) {
    out_copier_.emplace(hbm, dram);
    in_copier_.emplace(dram, hbm);
  }
}

std::uint64_t PoolMemory::device_bytes() noexcept {
  const std::lock_guard lock(mutex_);
  const std::shared_ptr<Arena>& hbm = arenas_[Medium::kHbm];
  std::uint64_t bytes = hbm != nullptr && hbm->on_device() ? hbm->mapped_bytes() : 0;
  if (device_mover_ != nullptr) bytes += device_mover_->device_bytes();
  return bytes;
}

std::shared_ptr<Arena> PoolMemory::arena(Medium medium) {
  guard_.check();
  const std::lock_guard lock(mutex_);
  guard_.check();
  return arenas_[medium];
}

PoolMemory::Arenas PoolMemory::arenas() {
  guard_.check();
  const std::lock_guard lock(mutex_);
  guard_.check();
  return arenas_;
}

PoolMemory::Kept PoolMemory::keep() noexcept {
  const std::lock_guard lock(mutex_);
  return {arenas_, device_mover_};
}

PoolMemory::Kept PoolMemory::release() noexcept {
  const std::lock_guard lock(mutex_);
  return {std::exchange(arenas_, {}), std::exchange(device_mover_, nullptr)};
}

void PoolMemory::zero(const Kept& kept, const Address* addresses, std::size_t n) {
  std::vector<Address> on_device;
  for (std::size_t i = 0; kept.mover != nullptr && i < n; ++i) {
    if (medium_bits_of(addresses[i]) == static_cast<std::uint32_t>(Medium::kHbm)) on_device.push_back(addresses[i]);
  }
  if (!on_device.empty()) ask_gpu(guard_, [&] { kept.mover->zero(on_device.data(), on_device.size()); });
  for (std::size_t i = 0; i < n; ++i) {
    const Arena& arena = *kept.arenas[medium_of(addresses[i])];
    if (arena.on_device()) continue;
    if (in_pieces_ != nullptr) {
      zero_pieces(arena, in_pieces_->pieces(medium_of(addresses[i])), block_of(addresses[i]));
      continue;
    }
    for (const Segment& segment : arena.segments()) {
      std::memset(segment.base + block_of(addresses[i]) * segment.stride, 0, segment.bytes);
    }
  }
}

void PoolMemory::set_pieces(const CacheBlocks& blocks) {
  in_pieces_ = &blocks;
  if (!two_tiers_) return;
  const Arena& hbm = *arenas_[Medium::kHbm];
  const Arena& dram = *arenas_[Medium::kDram];
  const BlockPieces& in_hbm = blocks.pieces(Medium::kHbm);
  const BlockPieces& in_dram = blocks.pieces(Medium::kDram);
  out_piece_copier_.emplace(hbm, in_hbm, dram, in_dram);
  in_piece_copier_.emplace(dram, in_dram, hbm, in_hbm);
}

void PoolMemory::copy(TierWay way, const Address* from, const Address* to, std::size_t n, const CopyOrder& after) {
  if (sharding_) {
    if (mover_ == nullptr) {
      throw Error(ErrorCode::kBusy, "no rank of this instance has joined", {{"retry_after_us", kRanksRetryAfterUs}});
    }
    return mover_->move(from, to, n);
  }
  if (in_pieces_ != nullptr) {
    return (way == TierWay::kOut ? *out_piece_copier_ : *in_piece_copier_).run(copiers_.team(), from, to, n);
  }
  if (device_mover_ == nullptr)
    return (way == TierWay::kOut ? *out_copier_ : *in_copier_).run(copiers_.team(), from, to, n);
  ask_gpu(guard_, [&] { device_mover_->move(way, from, to, n, after); });
}

void PoolMemory::check_stream(const CallerStream& after) {
  constexpr const char* kWhat = "blocks cannot be copied after the work of a stream";
  if (!after) return;
  if (on_device_) {
    const auto gpu = arena(Medium::kHbm)->context();
    return ask_gpu(guard_, [&] {
      const CurrentContext current(*gpu, kWhat);
      check_stream_of(*gpu, *after, kWhat);
    });
  }
  if (sharding_) {
    throw Error(ErrorCode::kUnsupported,
                "stream says nothing of the ranks of this instance, which work in streams of their own processes: each "
                "waits for all that its GPU has been given by then");
  }
  throw Error(ErrorCode::kArgument, "stream is for a pool on a GPU: the memory of this one has no streams");
}

std::shared_ptr<const DeviceOrder> PoolMemory::order_now(const CallerStream& stream) {
  return ask_gpu(guard_, [&] { return DeviceOrder::after_now(arena(Medium::kHbm)->context(), stream); });
}

std::shared_ptr<const DeviceOrder> PoolMemory::order_of_content(const CallerStream& stream) {
  check_stream(stream);
  if (!on_device_) return nullptr;
  return DeviceOrder::after(arena(Medium::kHbm)->context(), stream);
}

std::shared_ptr<const DeviceOrder> PoolMemory::order_after(const CallerStream& stream) {
  return stream ? order_of_content(stream) : nullptr;
}

}  // namespace kvpool
