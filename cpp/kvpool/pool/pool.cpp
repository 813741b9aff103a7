// A pool is made, and ends; what every verb asks first.
#include "kvpool/pool/pool.h"

#include <unistd.h>

#include <random>

#include "kvpool/arena/device_arena.h"
#include "kvpool/base/error.h"
#include "kvpool/base/fork_guard.h"
#include "kvpool/blocks/device_mover.h"
#include "kvpool/cuda/copier.h"
#include "kvpool/cuda/order.h"
#include "kvpool/pool/gpu_call.h"
#include "kvpool/pool/swap_threads.h"

namespace kvpool {
namespace {

void check_sharding(const PoolOptions& options) {
  if (options.sharding->shape().block_bytes() != options.layout.block_bytes()) {
    throw Error(ErrorCode::kArgument, "the shape of a block and its layout differ");
  }
  if (options.adopted_hbm || options.zero_on_alloc || options.pin_dram || options.device >= 0) {
    throw Error(ErrorCode::kArgument,
                "the memory of a logical instance is its ranks': adopted tensors and a device are given to "
                "RankArena.join, and zero_on_alloc is not to be had");
  }
}

int device_of(const PoolOptions& options) { return options.adopted_hbm ? options.adopted_hbm->device : options.device; }

const PoolOptions& checked(const PoolOptions& options) {
  if (options.layout.block_tokens == 0) throw Error(ErrorCode::kArgument, "block_tokens must be at least 1");
  if (options.layout.piece_bytes.empty()) throw Error(ErrorCode::kArgument, "a block needs at least one piece");
  const std::uint32_t hbm = options.adopted_hbm ? options.adopted_hbm->blocks : options.hbm_blocks;
  for (const std::uint32_t blocks : {hbm, options.dram_blocks}) {
    if (blocks > kBlocksMax) {
      throw Error(ErrorCode::kArgument,
                  std::to_string(blocks) + " blocks; a medium has at most " + std::to_string(kBlocksMax),
                  {{"requested", blocks}, {"capacity", kBlocksMax}});
    }
  }
  if (hbm == 0 && options.dram_blocks == 0) {
    throw Error(ErrorCode::kArgument, "a pool needs blocks: hbm_blocks and dram_blocks are both 0");
  }
  if (options.copy_threads < 1 || options.copy_threads > 256) {
    throw Error(ErrorCode::kArgument, "copy_threads must be 1 to 256, and is " + std::to_string(options.copy_threads));
  }
  if (options.sharding) check_sharding(options);
  if (device_of(options) >= 0 && hbm > 0 && options.dram_blocks > 0 && !options.pin_dram) {
    throw Error(ErrorCode::kArgument,
                "a pool on a GPU swaps with page-locked DRAM: pin_dram must be 'auto' or 'always'");
  }
  return options;
}

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
  arena.pin_device = device_of(options);
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

// Pools of one process start far apart in the lower half of the generations, and those of different processes at a
// random distance: an address of another pool is stale here, not somebody's block.
std::uint32_t first_generation() {
  constexpr std::uint32_t kHalf = 1U << (kGenerationBits - 1);
  constexpr std::uint32_t kStep = 2592279;        // odd, near kHalf / 1.618: any few steps are spread out evenly
  constexpr std::uint32_t kSpread = 2654435761U;  // a forked child inherits `next`, and has a process id of its own
  static std::atomic<std::uint32_t> next{std::random_device{}()};
  const auto process = static_cast<std::uint32_t>(getpid()) * kSpread;
  return 1 + (next.fetch_add(kStep, std::memory_order_relaxed) + process) % kHalf;
}

std::uint32_t first_generation(const PoolOptions& options) {
  return options.first_generation != 0 ? options.first_generation : first_generation();
}

}  // namespace

Pool::Pool(const PoolOptions& options)
    : layout_(checked(options).layout),
      sharding_(options.sharding),
      audit_each_call_(options.audit),
      zero_on_alloc_(options.zero_on_alloc),
      on_device_(device_of(options) >= 0),
      made_in_(fork_generation()),
      swap_threads_(std::make_unique<SwapThreads>()),
      space_({options.adopted_hbm ? options.adopted_hbm->blocks : options.hbm_blocks, options.dram_blocks},
             {first_generation(options), first_generation(options), 1},
             options.adopted_hbm && options.adopted_hbm->engine_allocates),
      arenas_{make_hbm(options), make_arena(options, Medium::kDram, options.dram_blocks),
              make_absent_arena(Medium::kDisk, 0, options.layout.block_bytes())},
      team_(options.copy_threads),
      index_(std::make_unique<PromptIndex>(options.layout.block_tokens, options.policy, PromptIndex::Values::kAddresses,
                                           static_cast<IndexObserver*>(this))) {
  two_tiers_ = arenas_[Medium::kHbm]->blocks() > 0 && arenas_[Medium::kDram]->blocks() > 0;
  if (on_device_) {
    if (arenas_[Medium::kHbm]->blocks() > 0) {
      device_mover_ = DeviceMover::make(*arenas_[Medium::kHbm], *arenas_[Medium::kDram]);
    }
  } else if (two_tiers_) {
    out_copier_.emplace(*arenas_[Medium::kHbm], *arenas_[Medium::kDram]);
    in_copier_.emplace(*arenas_[Medium::kDram], *arenas_[Medium::kHbm]);
  }
}

Pool::~Pool() {
  // In a forked child the index may stand still in the middle of another thread's change: it is left as it is.
  // The same goes for the threads and locks of swaps.
  if (made_in_ != fork_generation()) {
    static_cast<void>(swap_threads_.release());
    static_cast<void>(index_.release());
    return;
  }
  close();
}

void Pool::close() noexcept {
  if (made_in_ != fork_generation()) return;
  swap_threads_->refuse();
  {
    // Before the memory goes: peers write here, and the threads of what serves them call.
    const std::lock_guard lock(observer_mutex_);
    if (observer_ != nullptr) observer_->on_pool_closing();
  }
  swap_threads_->close();
  // The arenas go after the locks: letting go of adopted memory may wait for Python.
  MediumMap<std::shared_ptr<Arena>> arenas;
  std::shared_ptr<DeviceMover> mover;
  {
    const std::lock_guard pending(swap_in_mutex_);
    const std::lock_guard reclaim(reclaim_);
    const std::lock_guard lock(mutex_);
    closed_.store(true, std::memory_order_relaxed);
    arenas.swap(arenas_);
    mover.swap(device_mover_);
  }
}

void Pool::observe(PoolObserver* observer) {
  const std::lock_guard closing(observer_mutex_);
  const std::lock_guard lock(mutex_);
  observer_ = observer;
}

void Pool::guard_process() const {
  if (made_in_ != fork_generation()) [[unlikely]] {
    throw Error(ErrorCode::kFork, "this pool belongs to the parent process: make a new one after fork");
  }
}

void Pool::guard_open() const {
  guard_process();
  if (closed()) [[unlikely]] {
    throw Error(ErrorCode::kClosed, "the pool is closed");
  }
}

void Pool::guard() const {
  guard_open();
  if (failed_.load(std::memory_order_acquire)) [[unlikely]] {
    throw Error(*why_failed_);
  }
}

void Pool::fail(const Error& why) {
  const std::lock_guard lock(mutex_);
  if (failed_.load(std::memory_order_relaxed)) return;
  why_failed_ = why;
  failed_.store(true, std::memory_order_release);
  if (observer_ != nullptr) observer_->on_pool_failed(why);
}

std::optional<Error> Pool::failure() {
  const std::lock_guard lock(mutex_);
  return why_failed_;
}

void Pool::set_mover(TierMover* mover) {
  const std::lock_guard pending(swap_in_mutex_);
  const std::lock_guard reclaim(reclaim_);
  mover_ = mover;
}

// Throws only where the memory is a GPU's; when that is lost, so is the pool. REQUIRES: reclaim_ is held, of a copy in
// swap_in_mutex_; mutex_ is not.
void Pool::copy_tier(TierWay way, const Address* from, const Address* to, std::size_t n, const CopyOrder& after) {
  if (sharding_) {
    if (mover_ != nullptr) mover_->move(from, to, n);
    return;
  }
  if (device_mover_ == nullptr) return (way == TierWay::kOut ? *out_copier_ : *in_copier_).run(team_, from, to, n);
  ask_gpu(*this, [&] { device_mover_->move(way, from, to, n, after); });
}

// Before anything is done for a copy that is to follow it. What is wrong with a stream later, the copy finds.
void Pool::check_stream(const CallerStream& after) {
  constexpr const char* kWhat = "blocks cannot be copied after the work of a stream";
  if (!after) return;
  if (on_device_) {
    const auto gpu = arena(Medium::kHbm)->context();
    return ask_gpu(*this, [&] {
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

std::shared_ptr<const DeviceOrder> Pool::order_after(const CallerStream& stream) {
  guard();
  check_stream(stream);
  if (!stream) return nullptr;
  return DeviceOrder::after(arena(Medium::kHbm)->context(), stream);
}

std::shared_ptr<Arena> Pool::arena(Medium medium) {
  guard();
  const std::lock_guard lock(mutex_);
  guard();
  return arenas_[medium];
}

MediumMap<std::shared_ptr<Arena>> Pool::arenas() {
  guard();
  const std::lock_guard lock(mutex_);
  guard();
  return arenas_;
}

}  // namespace kvpool
