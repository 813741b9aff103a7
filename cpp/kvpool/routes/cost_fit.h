// Fits the cost of a write to measured writes.
//
// Thread-safety: pure.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "kvpool/routes/route_cost.h"

namespace kvpool {

struct CostSample {
  std::uint64_t pieces = 0;
  std::uint64_t bytes = 0;
  double us = 0;
};

// The prior that fits these best: it minimises the sum of the squares of its relative errors, and has no negative part,
// so more never costs less. Uses the median of writes of the same size, so one outlier of three has no effect. Ignores
// samples that took no time. Returns nullopt unless the rest has at least two lengths: one length gives no rate.
std::optional<RoutePrior> fit_cost(std::span<const CostSample> samples);

}  // namespace kvpool
