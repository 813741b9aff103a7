// Shared by the tests of owned arenas: what one leaves behind, and whether its memory can be used.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "child_process.h"
#include "kvpool/arena/arena.h"
#include "kvpool/base/error.h"
#include "open_descriptors.h"

namespace kvpool::testing {

inline constexpr const char* kLabel = "kvpool-arena-test";

inline ArenaOptions options_of(std::uint32_t blocks, std::vector<std::size_t> segment_bytes) {
  ArenaOptions options;
  options.blocks = blocks;
  options.segment_bytes = std::move(segment_bytes);
  options.label = kLabel;
  if (!test::kChildMayStartThreads) {
    options.commit_threads = 1;
  }
  return options;
}

inline std::size_t page() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

inline int mappings_of_arenas() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find(kLabel) != std::string::npos ? 1 : 0;
  }
  return count;
}

// Address space that is held without being usable.
inline std::uint64_t reserved_bytes() {
  std::ifstream maps("/proc/self/maps");
  std::uint64_t bytes = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find(" ---p ") != std::string::npos) {
      bytes += std::stoull(line.substr(line.find('-') + 1), nullptr, 16) - std::stoull(line, nullptr, 16);
    }
  }
  return bytes;
}

// The error that making an arena throws. Nothing may be left of the arena.
inline Error error_of(const ArenaOptions& options) {
  const int descriptors = open_descriptors();
  const int mappings = mappings_of_arenas();
  try {
    make_owned_arena(options);
  } catch (const Error& error) {
    if (open_descriptors() != descriptors || mappings_of_arenas() != mappings) {
      throw std::logic_error("an arena that failed has left something behind");  // is seen from a forked child, too
    }
    return error;
  }
  throw std::logic_error("an arena that should have failed was made");
}

inline std::int64_t field_of(const Error& error, const std::string& name) {
  for (const auto& [key, value] : error.fields()) {
    if (key == name) {
      return value;
    }
  }
  return -1;
}

inline bool is_zero(const Arena& arena) {
  const std::byte* base = arena.segments().front().base;
  return std::all_of(base, base + arena.payload_bytes(), [](std::byte byte) { return byte == std::byte{0}; });
}

// Writes and reads back a byte of every page, as a user would.
inline bool is_usable(const Arena& arena) {
  std::byte* base = arena.segments().front().base;
  for (std::size_t at = 0; at < arena.mapped_bytes(); at += 512) {
    base[at] = static_cast<std::byte>(at / 512 % 251);
  }
  for (std::size_t at = 0; at < arena.mapped_bytes(); at += 512) {
    if (base[at] != static_cast<std::byte>(at / 512 % 251)) {
      return false;
    }
  }
  return true;
}

}  // namespace kvpool::testing
