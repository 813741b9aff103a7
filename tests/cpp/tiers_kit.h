// A tier on a GPU, one in page-locked memory, and what moves blocks between them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "device_kit.h"
#include "kvpool/arena/device_arena.h"
#include "kvpool/blocks/device_mover.h"

#ifdef KVPOOL_FAKE_CUDA

namespace kvpool::testing::tiers {

using Addresses = std::vector<Address>;
using Pieces = std::vector<std::size_t>;

inline Address hbm(std::uint32_t block) { return make_address(0, Medium::kHbm, 1, block); }
inline Address dram(std::uint32_t block) { return make_address(0, Medium::kDram, 1, block); }

// A tier on a GPU and one in page-locked memory.
struct Tiers {
  explicit Tiers(std::uint32_t blocks = 8, Pieces device_pieces = {512, 512}, Pieces host_pieces = {1024},
                 const cuda::KernelSet* kernels = nullptr)
      : device(std::make_unique<DeviceArena>(device_options(blocks, std::move(device_pieces)))),
        host(make_owned_arena(host_options(blocks, std::move(host_pieces)))),
        mover(std::make_unique<DeviceMover>(*device, *host, kernels)) {}

  static DeviceArenaOptions device_options(std::uint32_t blocks, Pieces pieces) {
    DeviceArenaOptions options;
    options.blocks = blocks;
    options.segment_bytes = std::move(pieces);
    return options;
  }
  static ArenaOptions host_options(std::uint32_t blocks, Pieces pieces) {
    ArenaOptions options;
    options.blocks = blocks;
    options.segment_bytes = std::move(pieces);
    options.huge_pages = HugePages::kNever;
    options.pin = true;
    options.pin_device = 0;
    options.commit_threads = 1;
    return options;
  }
  void out(std::uint32_t from, std::uint32_t to, const CallerStream& after = {}) const {
    const Address source = hbm(from);
    const Address target = dram(to);
    mover->move(TierWay::kOut, &source, &target, 1, after);
  }
  void in(std::uint32_t from, std::uint32_t to, const CallerStream& after = {}) const {
    const Address source = dram(from);
    const Address target = hbm(to);
    mover->move(TierWay::kIn, &source, &target, 1, after);
  }

  std::unique_ptr<DeviceArena> device;
  std::shared_ptr<Arena> host;
  std::unique_ptr<DeviceMover> mover;
};

}  // namespace kvpool::testing::tiers

#endif  // KVPOOL_FAKE_CUDA
