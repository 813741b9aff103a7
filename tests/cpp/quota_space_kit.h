// A space with quotas, whose pools have blocks of different sizes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "kvpool/blocks/block_space.h"
#include "kvpool/blocks/quotas.h"
#include "kvpool/pool/shared_space.h"
#include "pool_fixture.h"
#include "thrown.h"

namespace kvpool::testing {

inline constexpr std::size_t kUnit = SharedSpace::kUnitBytesMin;

// A space with quotas, whose pools have blocks of whole units.
struct Models {
  Models(std::uint32_t hbm, std::uint32_t dram) : shared(options(hbm, dram)) {}

  static SharedSpaceOptions options(std::uint32_t hbm, std::uint32_t dram) {
    SharedSpaceOptions options;
    options.unit_bytes = kUnit;
    options.units[Medium::kHbm] = hbm;
    options.units[Medium::kDram] = dram;
    options.models_max = 4;
    options.huge_pages = HugePages::kNever;
    return options;
  }

  std::shared_ptr<Pool> load(std::uint32_t block_units, QuotaRule hbm, QuotaRule dram = {0, UINT32_MAX, 0},
                             bool audit = true, std::uint32_t pieces = 1) {
    PoolOptions options = small_options(0, 0);
    options.layout.piece_bytes = {block_units * kUnit};
    options.audit = audit;
    auto pool = std::make_shared<Pool>(options, shared.share(options.layout, pieces));
    set(*pool, hbm, dram);
    return pool;
  }

  void set(Pool& pool, QuotaRule hbm, QuotaRule dram = {0, UINT32_MAX, 0}) {
    MediumMap<QuotaRule> rules{};
    rules[Medium::kHbm] = hbm;
    rules[Medium::kDram] = dram;
    const SpaceLock lock = shared.space().lock();
    shared.space().set_rules(pool.space_number(), rules, "model " + std::to_string(pool.space_number()));
  }

  QuotaModel of(const Pool& pool, Medium medium = Medium::kHbm) {
    const SpaceLock lock = shared.space().lock();
    return shared.space().quota_tier(medium).models[pool.space_number()];
  }

  void audit() {
    const SpaceLock lock = shared.space().lock();
    shared.space().audit();
  }

  SharedSpace shared;
};

// Prompts of one page each, unpinned.
inline void cache(const std::shared_ptr<Pool>& pool, Token first, std::size_t prompts) {
  for (std::size_t i = 0; i < prompts; ++i) {
    insert(pool, prompt(first + static_cast<Token>(i), 1), alloc(*pool, 1));
  }
}

inline std::optional<Error> refusal(Pool& pool, std::size_t n, MediumChoice medium = Medium::kHbm) {
  Addresses out(n);
  return error_of([&] { pool.alloc_evicting(n, medium, out.data()); });
}

inline std::int64_t field(const Error& error, const std::string& name) {
  for (const auto& [field, value] : error.fields()) {
    if (name == field) return value;
  }
  return -1;
}

}  // namespace kvpool::testing
