// For tests of swaps on the fake GPU: a pool there, and work that stalls.
#pragma once

#include "device_kit.h"
#include "swap_kit.h"

#ifdef KVPOOL_FAKE_CUDA_PATH

#include <atomic>
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

// Work that ends when the test says so, or goes.
class Gate {
 public:
  explicit Gate(const EngineStream& engine) : engine_(engine) {
    engine_.run([open = open_] { eventually([&] { return open->load(); }); });
  }
  ~Gate() {
    open();
    engine_.wait();
  }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  void open() { *open_ = true; }

 private:
  const EngineStream& engine_;
  const std::shared_ptr<std::atomic<bool>> open_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace kvpool::testing

#endif  // KVPOOL_FAKE_CUDA_PATH
