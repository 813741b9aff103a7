// A small pool for tests, and stamps: a value in every block that names its owner.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <string_view>
#include <vector>

#include "fake_paths.h"
#include "kvpool/pool/pool.h"

namespace kvpool::testing {

using Tokens = std::vector<Token>;
using Addresses = std::vector<Address>;

inline constexpr std::uint32_t kPage = 4;

inline PoolOptions small_options(std::uint32_t hbm_blocks, std::uint32_t dram_blocks) {
  PoolOptions options;
  options.layout.block_tokens = kPage;
  options.layout.piece_bytes = {64, 64};
  options.hbm_blocks = hbm_blocks;
  options.dram_blocks = dram_blocks;
  options.huge_pages = HugePages::kNever;
  return options;
}

// `pages` pages with content that only this `prompt` has.
inline Tokens prompt(Token id, std::size_t pages) {
  Tokens tokens(pages * kPage);
  std::iota(tokens.begin(), tokens.end(), id * 100000);
  return tokens;
}

inline Addresses alloc(Pool& pool, std::size_t n, MediumChoice medium = Medium::kHbm) {
  Addresses addresses(n);
  if (!pool.try_alloc(n, medium, addresses.data())) pool.alloc_evicting(n, medium, addresses.data());
  return addresses;
}

struct Held {
  Pins pins;
  InsertOutcome outcome;
  Addresses canonical;
};

inline Held insert(const std::shared_ptr<Pool>& pool, const Tokens& tokens, const Addresses& addresses,
                   std::string_view name_space = "", bool free_duplicates = false) {
  Held held;
  held.canonical.resize(addresses.size());
  const InsertItem item{tokens.data(), tokens.size(), addresses.data(), addresses.size(), held.canonical.data()};
  held.outcome = std::move(pool->insert(name_space, {&item, 1}, free_duplicates).front());
  held.pins = Pins(pool, held.outcome.pin);
  return held;
}

struct Found {
  Pins pins;
  IndexHit hit;
  Addresses addresses;
};

inline Found match(const std::shared_ptr<Pool>& pool, const Tokens& tokens, std::string_view name_space = "") {
  Found found;
  found.addresses.resize(tokens.size() / kPage);
  found.hit = pool->match(name_space, tokens.data(), tokens.size(), found.addresses.data());
  found.addresses.resize(found.hit.pages);
  found.pins = Pins(pool, found.hit.pin);
  return found;
}

// Where the CPU finds these bytes of an arena; of a GPU's, the fake driver knows.
inline std::byte* cpu_address(const Arena& arena, std::byte* at, [[maybe_unused]] std::size_t bytes) {
#ifdef KVPOOL_FAKE_CUDA
  if (arena.on_device()) {
    static void* const driver = dlopen(fake_cuda_path(), RTLD_NOW);
    static auto* const host =
        reinterpret_cast<void* (*)(unsigned long long, std::size_t)>(dlsym(driver, "fake_cuda_host"));
    return static_cast<std::byte*>(host(reinterpret_cast<std::uintptr_t>(at), bytes));
  }
#endif
  static_cast<void>(arena);
  return at;
}

// Every piece of the block is filled with the stamp.
inline void stamp(Pool& pool, Address address, std::uint64_t value) {
  const auto arena = pool.arena(medium_of(address));
  for (const Segment& segment : arena->segments()) {
    std::byte* piece = cpu_address(*arena, segment.base + block_of(address) * segment.stride, segment.bytes);
    for (std::size_t at = 0; at + sizeof value <= segment.bytes; at += sizeof value) {
      std::memcpy(piece + at, &value, sizeof value);
    }
  }
}

inline bool has_stamp(Pool& pool, Address address, std::uint64_t value) {
  const auto arena = pool.arena(medium_of(address));
  for (const Segment& segment : arena->segments()) {
    const std::byte* piece = cpu_address(*arena, segment.base + block_of(address) * segment.stride, segment.bytes);
    for (std::size_t at = 0; at + sizeof value <= segment.bytes; at += sizeof value) {
      if (std::memcmp(piece + at, &value, sizeof value) != 0) return false;
    }
  }
  return true;
}

}  // namespace kvpool::testing
