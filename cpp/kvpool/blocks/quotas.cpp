#include "kvpool/blocks/quotas.h"

#include <algorithm>

namespace kvpool {
namespace {

using Signed = std::int64_t;
template <class T>
using PerModel = std::array<T, kQuotaModelsMax>;

struct Giver {
  std::uint32_t model = 0;
  Signed height = 0;  // units beyond its quota
  Signed can = 0;     // units that it can give
  Signed low() const noexcept { return height - can; }
};

Signed kept_at(const PerModel<Giver>& givers, std::size_t n, Signed level) noexcept {
  Signed kept = 0;
  for (std::size_t i = 0; i < n; ++i) kept += std::clamp(level, givers[i].low(), givers[i].height);
  return kept;
}

// Takes `wanted` units, or all that can be given, always from the highest that can give: all end at one level, except
// those that can give no more. Units that do not divide stay with the first. Returns how many it took.
std::uint32_t from_the_top(std::uint32_t wanted, const PerModel<Giver>& givers, std::size_t n,
                           PerModel<std::uint32_t>& evicted) noexcept {
  if (n == 0) return 0;
  Signed highs = 0;
  Signed lows = 0;
  Signed bottom = givers[0].low();
  Signed top = givers[0].height;
  for (std::size_t i = 0; i < n; ++i) {
    highs += givers[i].height;
    lows += givers[i].low();
    bottom = std::min(bottom, givers[i].low());
    top = std::max(top, givers[i].height);
  }
  const Signed keep = std::max(lows, highs - static_cast<Signed>(wanted));
  while (bottom < top) {  // the highest level at which they keep no more than that
    const Signed middle = bottom + (top - bottom + 1) / 2;
    if (kept_at(givers, n, middle) <= keep) {
      bottom = middle;
    } else {
      top = middle - 1;
    }
  }
  Signed left = keep - kept_at(givers, n, bottom);
  Signed taken = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const Giver& giver = givers[i];
    Signed stays = std::clamp(bottom, giver.low(), giver.height);
    if (left > 0 && stays == bottom && stays < giver.height) {
      ++stays;
      --left;
    }
    evicted[giver.model] += static_cast<std::uint32_t>(giver.height - stays);
    taken += giver.height - stays;
  }
  return static_cast<std::uint32_t>(taken);
}

// Evicts up to `missing` units of other models: of what they have beyond their quotas, or, with `within`, beyond their
// reserves.
std::uint32_t from_neighbours(const QuotaTier& tier, std::uint32_t model, std::uint32_t missing, bool within,
                              PerModel<std::uint32_t>& evicted) noexcept {
  PerModel<Giver> givers{};
  std::size_t n = 0;
  for (std::uint32_t other = 0; other < kQuotaModelsMax; ++other) {
    const QuotaModel& its = tier.models[other];
    const Signed historical = Signed{its.historical} - evicted[other];
    const Signed has = its.active + historical;
    const Signed floor = within ? its.rule.reserve : std::max(its.rule.reserve, its.rule.quota);
    const Signed can = std::min(historical, has - floor);
    if (other != model && can > 0) givers[n++] = {other, has - its.rule.quota, can};
  }
  return from_the_top(missing, givers, n, evicted);
}

// The model's own eviction first, then those of its neighbours by number. The first have the free units of DRAM.
QuotaRoom room_of(std::uint32_t model, std::uint32_t free, const PerModel<std::uint32_t>& evicted,
                  const QuotaTier* dram) noexcept {
  QuotaRoom room;
  room.free = free;
  Signed below = dram != nullptr ? dram->free() : 0;
  const auto add = [&](std::uint32_t owner) {
    const Signed units = evicted[owner];
    if (units == 0) return;
    Signed swapped = 0;
    if (dram != nullptr) {
      const QuotaModel& its = dram->models[owner];
      const Signed may = std::min(its.rule.quota, dram->limit(owner));
      swapped = std::max<Signed>(0, std::min({units, may - its.active - its.historical, below}));
      below -= swapped;
    }
    room.evictions[room.count++] = {owner, static_cast<std::uint32_t>(units), static_cast<std::uint32_t>(swapped)};
  };
  add(model);
  for (std::uint32_t other = 0; other < kQuotaModelsMax; ++other) {
    if (other != model) add(other);
  }
  return room;
}

}  // namespace

std::uint64_t QuotaTier::committed() const noexcept {
  std::uint64_t sum = 0;
  for (const QuotaModel& model : models) sum += std::max(model.active, model.rule.reserve);
  return sum;
}

std::uint32_t QuotaTier::free() const noexcept {
  std::uint64_t used = 0;
  for (const QuotaModel& model : models) used += std::uint64_t{model.active} + model.historical;
  return used >= capacity ? 0 : static_cast<std::uint32_t>(capacity - used);
}

std::uint32_t QuotaTier::limit(std::uint32_t model) const noexcept {
  return std::min(models[model].rule.limit, capacity);
}

std::uint32_t growth_of(const QuotaModel& model, std::uint64_t committed, std::uint32_t capacity) noexcept {
  const Signed unclaimed = Signed{capacity} - static_cast<Signed>(committed);
  const Signed own_reserve = std::max<Signed>(0, Signed{model.rule.reserve} - model.active);
  // Within its reserve a model always grows: what it claims does not.
  const Signed by_all = own_reserve + std::max<Signed>(0, unclaimed);
  const Signed by_limit = Signed{std::min(model.rule.limit, capacity)} - model.active;
  return static_cast<std::uint32_t>(std::max<Signed>(0, std::min(by_all, by_limit)));
}

QuotaRoom reclaim(const QuotaTier& tier, std::uint32_t model, std::uint32_t units, const QuotaTier* dram) noexcept {
  const QuotaModel& own = tier.models[model];
  const Signed above = Signed{own.active} + own.historical + units - tier.limit(model);
  PerModel<std::uint32_t> evicted{};
  evicted[model] = static_cast<std::uint32_t>(std::clamp<Signed>(above, 0, own.historical));
  std::uint32_t missing = units - std::min(units, evicted[model]);
  const std::uint32_t free = std::min(tier.free(), missing);
  missing -= free;
  missing -= from_neighbours(tier, model, missing, /*within=*/false, evicted);
  const std::uint32_t mine = std::min(own.historical - evicted[model], missing);
  evicted[model] += mine;
  missing -= mine;
  from_neighbours(tier, model, missing, /*within=*/true, evicted);
  return room_of(model, free, evicted, dram);
}

}  // namespace kvpool
