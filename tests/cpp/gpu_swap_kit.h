// For tests of swaps on the fake GPU: a pool there.
#pragma once

#include "device_kit.h"
#include "swap_kit.h"

#ifdef KVPOOL_FAKE_CUDA

#include <memory>

namespace kvpool::testing {

inline std::shared_ptr<Pool> gpu_pool(std::uint32_t hbm_blocks = 8, std::uint32_t dram_blocks = 8) {
  PoolOptions options = small_options(hbm_blocks, dram_blocks);
  options.device = 0;
  options.pin_dram = true;
  options.audit = true;
  return std::make_shared<Pool>(options);
}

inline void store_stamped(const std::shared_ptr<Pool>& pool, Token id, std::size_t pages, Medium medium,
                          std::uint64_t value) {
  const Addresses blocks = alloc(*pool, pages, medium);
  for (const Address block : blocks) stamp(*pool, block, value);
  insert(pool, prompt(id, pages), blocks);
}

}  // namespace kvpool::testing

#endif  // KVPOOL_FAKE_CUDA
