// A pool is made, and ends.
#include "kvpool/pool/pool.h"

#include <unistd.h>

#include <random>
#include <string>

#include "kvpool/blocks/block_space.h"
#include "kvpool/blocks/cache_blocks.h"
#include "kvpool/exec/executor.h"
#include "kvpool/pool/cache_copies.h"
#include "kvpool/pool/disk_tier.h"
#include "kvpool/pool/peer_claims.h"
#include "kvpool/pool/pool_allocator.h"
#include "kvpool/pool/pool_memory.h"
#include "kvpool/pool/prompt_cache.h"
#include "kvpool/pool/space_reclaimer.h"
#include "kvpool/pool/tier_moves.h"

namespace kvpool {
namespace {

// Pools of one process start far apart in the lower half of the generations, and pools of different processes at a
// random distance, so that an address of another pool is stale here and names no block.
std::uint32_t first_generation() {
  constexpr std::uint32_t kHalf = 1U << (kGenerationBits - 1);
  constexpr std::uint32_t kStep = 2592279;        // odd, near kHalf / 1.618: any few steps are spread out evenly
  constexpr std::uint32_t kSpread = 2654435761U;  // a forked child inherits `next`, but has another process id
  static std::atomic<std::uint32_t> next{std::random_device{}()};
  const auto process = static_cast<std::uint32_t>(getpid()) * kSpread;
  return 1 + (next.fetch_add(kStep, std::memory_order_relaxed) + process) % kHalf;
}

std::uint32_t first_generation(const PoolOptions& options) {
  return options.first_generation != 0 ? options.first_generation : first_generation();
}

// Nothing is made of options that contradict each other.
SpaceShare own_space(const PoolOptions& options) {
  checked(options);
  const std::uint32_t on_disk = options.disk ? options.disk->blocks : 0;
  return {std::make_shared<BlockSpace>(MediumMap<std::uint32_t>{options.blocks_in_hbm(), options.dram_blocks, on_disk}),
          1, PoolMemory::make_arenas(options)};
}

const SpaceShare& checked(const SpaceShare& share) {
  for (const Medium medium : {Medium::kHbm, Medium::kDram}) {  // blocks on DISK have no arena
    const std::uint32_t units = share.space->capacity(medium);
    const std::uint32_t blocks = share.block_units == 0 ? 0 : share.space->numbers(medium, share.block_units);
    if (share.arenas[medium] != nullptr && share.arenas[medium]->blocks() == blocks) continue;
    throw Error(ErrorCode::kArgument,
                std::string(medium_name(medium)) + " of the space has " + std::to_string(units) +
                    " units, in which a block has one of " + std::to_string(blocks) +
                    " places: that is what the arena is to have",
                {{"units", units}, {"blocks", blocks}});
  }
  return share;
}

}  // namespace

Pool::Pool(const PoolOptions& options) : Pool(options, own_space(options)) {}

Pool::Pool(const PoolOptions& options, SpaceShare share)
    : executor_(std::make_unique<Executor>([this](const Error& why) { fail(why); })),
      memory_(std::make_unique<PoolMemory>(options, checked(share).arenas, guard_, *executor_)),
      space_(std::move(share.space)),
      blocks_(std::make_unique<CacheBlocks>(
          *space_, CacheShape{share.block_units,
                              share.pieces,
                              {first_generation(options), first_generation(options), first_generation(options)},
                              options.engine_allocates})),
      cache_(std::make_unique<PromptCache>(*blocks_, options.layout.block_tokens, options.policy, options.audit)),
      moves_(std::make_unique<TierMoves>(*blocks_, *cache_, *memory_, guard_, *this, *executor_)),
      allocator_(std::make_unique<PoolAllocator>(*blocks_, *cache_, *moves_, *memory_, guard_, options.zero_on_alloc)),
      claims_(std::make_unique<PeerClaims>(*blocks_, *cache_, *allocator_, guard_)),
      copies_(std::make_unique<CacheCopies>(*blocks_, *claims_, *memory_, *moves_, guard_, *this)),
      reclaimer_(std::move(share.reclaimer)) {
  claims_->set_lend_max(options.lend_max);
  if (share.pieces > 1) memory_->set_pieces(*blocks_);
  if (reclaimer_ != nullptr) reclaimer_->enter(*blocks_, *cache_, *moves_);
  if (options.disk) disk_ = std::make_unique<DiskTier>(options, *blocks_, *cache_, *memory_, *moves_, guard_, *this);
}

Pool::~Pool() {
  if (guard_.in_child()) {
    // Another thread may have been in the middle of a change: they are left as they are.
    static_cast<void>(disk_.release());
    static_cast<void>(moves_.release());
    static_cast<void>(cache_.release());
    static_cast<void>(blocks_.release());
    return;
  }
  close();
}

void Pool::close() noexcept {
  if (guard_.in_child()) return;
  moves_->refuse();
  guard_.tell_closing();  // before the memory goes: peers write here, and the threads of what serves them call
  moves_->close();
  if (disk_ != nullptr) disk_->close();
  PoolMemory::Kept kept;  // goes after the locks
  {
    const TierMoves::Idle nobody_copies = moves_->idle();
    const SpaceLock lock = blocks_->lock();
    guard_.mark_closed();
    if (space_->has_quotas()) {
      // Others can use at once what nothing here can.
      space_->end_rules(blocks_->number());
      cache_->end();
    }
    kept = memory_->release();
  }
  // After its cache is dropped: until it leaves, a thread that makes room can reach what it counts.
  if (reclaimer_ != nullptr) reclaimer_->leave(blocks_->number());
  executor_->close();
}

std::uint32_t Pool::space_number() const noexcept { return blocks_->number(); }

std::shared_ptr<const DeviceOrder> Pool::order_of_content(const CallerStream& stream) {
  guard_.check();
  return memory_->order_of_content(stream);
}

std::shared_ptr<const DeviceOrder> Pool::order_of_all_now() {
  guard();
  return memory_->on_device() ? memory_->order_now({}) : nullptr;
}

std::shared_ptr<const DeviceOrder> Pool::order_after(const CallerStream& stream) {
  guard();
  return memory_->order_after(stream);
}

// Throws unless the pool may have this id. REQUIRES: the space is locked.
void Pool::check_instance(std::uint32_t instance) const {
  if (instance == 0 || instance > kInstanceMax) {
    throw Error(ErrorCode::kArgument,
                "instance ids are 1 to " + std::to_string(kInstanceMax) + ", and this is " + std::to_string(instance),
                {{"instance", instance}, {"maximum", kInstanceMax}});
  }
  if (instance_ != 0 && instance_ != instance) {
    throw Error(ErrorCode::kState, "the pool is instance " + std::to_string(instance_) + " already",
                {{"instance", instance_}});
  }
}

void Pool::accept_instance(std::uint32_t instance) {
  guard();
  const SpaceLock lock = blocks_->lock();
  check_instance(instance);
  if (instance_ == instance) return;
  blocks_->accept_instance(instance);
  instance_ = instance;
  cache_->accept_instance(instance);
}

void Pool::set_instance(std::uint32_t instance) {
  guard();
  const SpaceLock lock = blocks_->lock();
  check_instance(instance);
  if (keeps_instance_) return;
  blocks_->set_instance(instance);
  instance_ = instance;
  keeps_instance_ = true;
  cache_->set_instance(instance);
}

void Pool::forget_instance() noexcept {
  const SpaceLock lock = blocks_->lock();
  if (keeps_instance_ || instance_ == 0) return;
  blocks_->accept_instance(0);
  instance_ = 0;
  cache_->accept_instance(0);
}

bool Pool::on_device() const noexcept { return memory_->on_device(); }

const std::optional<Sharding>& Pool::sharding() const noexcept { return memory_->sharding(); }

void Pool::set_mover(TierMover* mover) { moves_->set_mover(mover); }

// --- what there is ---

const Layout& Pool::layout() const noexcept { return memory_->layout(); }

std::shared_ptr<Arena> Pool::arena(Medium medium) { return memory_->arena(medium); }

MediumMap<std::shared_ptr<Arena>> Pool::arenas() { return memory_->arenas(); }

PoolStats Pool::stats_locked() noexcept {
  PoolStats stats = cache_->stats();
  stats.device_bytes = memory_->device_bytes();
  return stats;
}

PoolStats Pool::stats() {
  guard_open();
  const SpaceLock lock = blocks_->lock();
  return stats_locked();
}

PoolStats Pool::audit() {
  guard_open();
  const SpaceLock lock = blocks_->lock();
  cache_->audit();
  return stats_locked();
}

}  // namespace kvpool
