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

// The prior that fits these best: the sum of the squares of its relative errors is least, and no part of it is
// negative, so more never costs less. Of writes of the same size the median counts: with three of them, one outlier
// does not. Samples that took no time are left out. Returns nothing unless the rest has at least two lengths: one
// length gives no rate.
std::optional<RoutePrior> fit_cost(std::span<const CostSample> samples);

}  // namespace kvpool
