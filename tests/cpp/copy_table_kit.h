// Blocks on the fake GPU and on the host, as tests of copies by table fill them, choose them and compare them.
#pragma once

#include "device_kit.h"

#ifdef KVPOOL_FAKE_CUDA

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "kvpool/arena/device_arena.h"
#include "kvpool/base/address.h"

namespace kvpool::testing::copy_tables {

using Addresses = std::vector<Address>;

inline constexpr std::uint32_t kMany = 20'000;
inline constexpr std::size_t kBlockBytes = 32;

inline Address hbm(std::uint32_t block) { return make_address(0, Medium::kHbm, 1, block); }
inline Address dram(std::uint32_t block) { return make_address(0, Medium::kDram, 1, block); }

inline std::shared_ptr<Arena> on_gpu(std::uint32_t blocks, std::vector<std::size_t> pieces = {8, 24}) {
  return std::make_shared<DeviceArena>(DeviceArenaOptions{.blocks = blocks, .segment_bytes = std::move(pieces)});
}

inline std::shared_ptr<Arena> on_host(std::uint32_t blocks) {
  ArenaOptions options;
  options.blocks = blocks;
  options.segment_bytes = {kBlockBytes};
  options.huge_pages = HugePages::kNever;
  options.pin = true;
  options.pin_device = 0;
  options.commit_threads = 1;
  return make_owned_arena(options);
}

// All words of a block: who filled it, and its number.
inline std::uint64_t stamp(std::uint32_t seed, std::uint32_t block) { return (std::uint64_t{seed} << 32) | block; }

inline void fill(const FakeCuda& cuda, const Arena& arena, std::uint32_t seed) {
  for (const Segment& segment : arena.segments()) {
    std::byte* const bytes = cuda.host(segment.base, segment.stride * arena.blocks());
    std::vector<std::uint64_t> piece(segment.bytes / sizeof(std::uint64_t));
    for (std::uint32_t block = 0; block < arena.blocks(); ++block) {
      std::fill(piece.begin(), piece.end(), stamp(seed, block));
      std::memcpy(bytes + block * segment.stride, piece.data(), segment.bytes);
    }
  }
}

// How many of these blocks do not hold the content that the other list's blocks had with that seed.
inline std::size_t wrong(const FakeCuda& cuda, const Arena& arena, const Addresses& to, std::uint32_t seed,
                         const Addresses& from) {
  std::size_t count = 0;
  for (const Segment& segment : arena.segments()) {
    const std::byte* const bytes = cuda.host(segment.base, segment.stride * arena.blocks());
    std::vector<std::uint64_t> piece(segment.bytes / sizeof(std::uint64_t));
    for (std::size_t i = 0; i < to.size(); ++i) {
      std::fill(piece.begin(), piece.end(), stamp(seed, block_of(from[i])));
      count += std::memcmp(bytes + block_of(to[i]) * segment.stride, piece.data(), segment.bytes) == 0 ? 0 : 1;
    }
  }
  return count;
}

// Blocks [first, first + n), in any order.
inline Addresses shuffled(Address (*make)(std::uint32_t), std::uint32_t first, std::uint32_t n, unsigned seed) {
  Addresses all;
  for (std::uint32_t i = 0; i < n; ++i) all.push_back(make(first + i));
  std::shuffle(all.begin(), all.end(), std::minstd_rand(seed));
  return all;
}

// Whatever takes memory of the driver or gives it back.
inline std::size_t memory_calls(const FakeCuda& cuda) {
  std::size_t count = 0;
  for (const char* call : {"cuMemAlloc", "cuMemFree", "cuMemHostRegister", "cuMemHostUnregister", "cuMemCreate",
                           "cuMemMap", "cuMemUnmap"}) {
    count += cuda.count(call);
  }
  return count;
}

}  // namespace kvpool::testing::copy_tables

#endif  // KVPOOL_FAKE_CUDA
