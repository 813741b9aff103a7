// A pool that audits itself after each call, and what its statistics say of a medium.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kvpool/pool/pool.h"
#include "pool_fixture.h"

namespace kvpool::testing {

inline std::shared_ptr<Pool> audited_pool(std::uint32_t hbm, std::uint32_t dram) {
  PoolOptions options = small_options(hbm, dram);
  options.audit = true;
  return std::make_shared<Pool>(options);
}

inline const MediumCounts& hbm_counts(const PoolStats& stats) { return stats.media[Medium::kHbm]; }
inline const MediumCounts& dram_counts(const PoolStats& stats) { return stats.media[Medium::kDram]; }
inline std::uint32_t count_in(const MediumCounts& counts, BlockState state) {
  return counts.by_state[static_cast<std::size_t>(state)];
}

}  // namespace kvpool::testing
