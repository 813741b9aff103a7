// Quotas: how much of one medium each cache of a space may have, and whose cached blocks make room. All in units.
//
// The same rules as kvpool.policy.multiplexing (admission.py, with the proof), for allocations that must not wait for
// Python. A test drives both with random states and compares.
//
//   admission   The sum over models of max(active, reserve) never exceeds the capacity. So evicting historical units
//               alone serves every growth that was admitted, and restores every reserve.
//   reclaiming  free units; historical ones of neighbours beyond their quotas, from the one furthest beyond; the
//               model's own; those of neighbours within their quotas. No neighbour falls below its reserve.
//
// Pure: a state in, a plan out. Nothing allocates.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace kvpool {

inline constexpr std::uint32_t kQuotaModelsMax = 16;

struct QuotaRule {
  std::uint32_t reserve = 0;  // it can always have so many
  std::uint32_t limit = 0;    // it never has more, historical ones included
  std::uint32_t quota = 0;    // a target: historical units beyond it are reclaimed first
};

struct QuotaModel {
  QuotaRule rule;
  std::uint32_t active = 0;      // cannot be evicted: of requests, pinned, a peer's
  std::uint32_t historical = 0;  // can
};

// How many more active units a model may have, while `committed` of `capacity` are active or reserved.
std::uint32_t growth_of(const QuotaModel& model, std::uint64_t committed, std::uint32_t capacity) noexcept;

// One medium of a space at one moment. Models without blocks and rules change nothing.
struct QuotaTier {
  std::uint64_t committed() const noexcept;  // the sum of max(active, reserve)
  std::uint32_t free() const noexcept;
  std::uint32_t limit(std::uint32_t model) const noexcept;
  std::uint32_t growth(std::uint32_t model) const noexcept { return growth_of(models[model], committed(), capacity); }
  bool admits(std::uint32_t model, std::uint32_t units) const noexcept { return units == 0 || units <= growth(model); }

  std::uint32_t capacity = 0;
  std::array<QuotaModel, kQuotaModelsMax> models{};
};

struct QuotaEviction {
  std::uint32_t model = 0;
  std::uint32_t units = 0;    // that leave the medium
  std::uint32_t swapped = 0;  // of these, to DRAM
};

struct QuotaRoom {
  const QuotaEviction* begin() const noexcept { return evictions.data(); }
  const QuotaEviction* end() const noexcept { return evictions.data() + count; }

  std::uint32_t free = 0;  // units of the growth that nobody occupies
  std::size_t count = 0;
  std::array<QuotaEviction, kQuotaModelsMax> evictions{};
};

// Room for `units` more active units of a model. `dram`: the tier below, or null: what is evicted is dropped.
// REQUIRES: the tier admits it.
QuotaRoom reclaim(const QuotaTier& tier, std::uint32_t model, std::uint32_t units, const QuotaTier* dram) noexcept;

}  // namespace kvpool
