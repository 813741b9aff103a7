// The quotas of a space's caches: what they may take now.
#include <algorithm>
#include <string>
#include <utility>

#include "kvpool/base/error.h"
#include "kvpool/base/fork_guard.h"
#include "kvpool/blocks/block_space.h"
#include "kvpool/blocks/cache_blocks.h"
#include "kvpool/blocks/cached_blocks.h"

namespace kvpool {
namespace {

[[noreturn]] void refuse(const std::string& text, const std::string& model, const QuotaTier& tier,
                         const QuotaModel& its, std::uint64_t requested) {
  Error error(ErrorCode::kOutOfBlocks, text,
              {{"requested", static_cast<std::int64_t>(requested)},
               {"free", tier.free()},
               {"active", its.active},
               {"evictable", its.historical},
               {"capacity", tier.capacity}});
  error.add("reserve", its.rule.reserve);
  error.add("limit", its.rule.limit);
  error.set_model(model);
  throw error.because(ErrorCause::kQuota);
}

}  // namespace

void BlockSpace::set_cached(std::uint32_t number, const CachedBlocks* cached) noexcept {
  if (made_in_ != fork_generation()) return;
  const SpaceLock held = lock();
  seats_[number].cached = cached;
}

QuotaModel BlockSpace::model_of(const Seat& seat, Medium medium) noexcept {
  QuotaModel model{seat.rules[medium]};
  if (seat.cache == nullptr) return model;
  const BlockStore& blocks = seat.cache->store(medium);
  const std::uint32_t owned = blocks.capacity() - blocks.free_count();
  std::uint32_t historical = seat.cache->unread(medium);  // nobody's, as soon as a transfer has read them
  if (seat.cached != nullptr) historical += seat.cached->unpinned_blocks(medium);
  historical = std::min(historical, owned);
  model.historical = historical * seat.cache->block_units();
  model.active = (owned - historical) * seat.cache->block_units();
  return model;
}

QuotaTier BlockSpace::quota_tier(Medium medium) const noexcept {
  QuotaTier tier;
  tier.capacity = units_[medium] - left_behind_[medium];
  for (std::size_t number = 0; number < seats_.size(); ++number) {
    tier.models[number] = model_of(seats_[number], medium);
  }
  return tier;
}

std::size_t BlockSpace::may_take(const CacheBlocks& cache, Medium medium) const noexcept {
  if (seats_[cache.number()].held) return 0;
  const std::uint32_t capacity = units_[medium] - left_behind_[medium];
  QuotaModel own;
  std::uint64_t committed = 0;
  for (const Seat& seat : seats_) {  // as quota_tier(), for each allocation
    if (!seat.taken) continue;
    const QuotaModel model = model_of(seat, medium);
    committed += std::max(model.active, model.rule.reserve);
    if (seat.cache == &cache) own = model;
  }
  const std::uint32_t limit = std::min(own.rule.limit, capacity);
  const std::uint32_t has = own.active + own.historical;
  const std::uint32_t below_limit = limit > has ? limit - has : 0;
  return std::min(growth_of(own, committed, capacity), below_limit) / cache.block_units();
}

std::size_t BlockSpace::may_cache(const CacheBlocks& cache, Medium medium) const noexcept {
  const QuotaModel model = model_of(seats_[cache.number()], medium);
  const std::uint32_t limit = std::min(model.rule.limit, units_[medium] - left_behind_[medium]);
  const std::uint32_t has = model.active + model.historical;
  return (limit > has ? limit - has : 0) / cache.block_units();
}

bool BlockSpace::overdrawn(const CacheBlocks& cache, MediumMap<std::uint32_t> freed_soon) const noexcept {
  if (seats_[cache.number()].held) return true;
  for (const Medium medium : kMedia) {
    QuotaTier tier = quota_tier(medium);
    tier.models[cache.number()].active -= freed_soon[medium] * cache.block_units();
    if (tier.committed() > tier.capacity) return true;
  }
  return false;
}

void BlockSpace::set_rules(std::uint32_t number, const MediumMap<QuotaRule>& rules, std::string model) {
  if (seats_[number].ended) {
    throw Error(ErrorCode::kState, model + ": its pool is closed, and has no more quotas");
  }
  for (const Medium medium : kMedia) {
    const QuotaRule& rule = rules[medium];
    const std::string where = std::string(" units of ") + medium_name(medium);
    if (rule.reserve > rule.limit) {
      throw Error(ErrorCode::kArgument,
                  model + ": a reserve of " + std::to_string(rule.reserve) + where + " is above the limit of " +
                      std::to_string(rule.limit),
                  {{"reserve", rule.reserve}, {"limit", rule.limit}});
    }
    QuotaTier tier = quota_tier(medium);
    tier.models[number].rule = rule;
    std::uint64_t reserved = 0;
    for (const QuotaModel& each : tier.models) reserved += each.rule.reserve;
    if (reserved > tier.capacity) {
      throw Error(ErrorCode::kArgument,
                  model + ": the reserves would be " + std::to_string(reserved) + where + " together, and there are " +
                      std::to_string(tier.capacity),
                  {{"reserve", rule.reserve}, {"capacity", tier.capacity}});
    }
    if (tier.committed() <= tier.capacity) continue;
    const std::uint64_t others = tier.committed() - std::max(tier.models[number].active, rule.reserve);
    refuse(model + ": a reserve of " + std::to_string(rule.reserve) + where + " does not fit beside the " +
               std::to_string(others) + " that others have active or reserved, of " + std::to_string(tier.capacity),
           model, tier, {rule, static_cast<std::uint32_t>(others), 0}, rule.reserve);
  }
  seats_[number].rules = rules;
  seats_[number].model = std::move(model);
}

void BlockSpace::check_growth(const CacheBlocks& cache, Medium medium, std::size_t n) const {
  if (!has_quotas_) return;
  const std::uint64_t units = std::min<std::uint64_t>(n, UINT32_MAX) * cache.block_units();
  if (holds_growth(cache.number()) || units > quota_tier(medium).growth(cache.number())) {
    throw_out_of_quota(cache, medium, units, "");
  }
}

void BlockSpace::throw_out_of_quota(const CacheBlocks& cache, Medium medium, std::uint64_t units,
                                    const std::string& why) const {
  const QuotaTier tier = quota_tier(medium);
  const std::uint32_t number = cache.number();
  const QuotaModel& its = tier.models[number];
  const std::uint32_t limit = tier.limit(number);
  std::string text = seats_[number].model + " asked for " + std::to_string(units) + " units of " + medium_name(medium) +
                     " of the space: ";
  if (!why.empty()) {
    text += why;
  } else if (seats_[number].held) {
    text += "it is being unloaded, or is kept unloaded";
  } else if (its.active + units > limit) {
    text += std::to_string(its.active) + " of its limit of " + std::to_string(limit) + " are active";
  } else {
    text += std::to_string(tier.committed()) + " of " + std::to_string(tier.capacity) + " are active or reserved";
  }
  text += "; it has " + std::to_string(its.active) + " active and " + std::to_string(its.historical) +
          " historical, and " + std::to_string(tier.free()) + " are free";
  refuse(text, seats_[number].model, tier, {{its.rule.reserve, limit, its.rule.quota}, its.active, its.historical},
         units);
}

}  // namespace kvpool
