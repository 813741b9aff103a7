// The file that says what a store is: kvpool.store. Written once, and renamed into its place when all else is there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvpool/disk/disk_store.h"
#include "kvpool/disk/records.h"

namespace kvpool {

struct StoreDescription {
  DiskId id{};
  std::uint32_t slots = 0;
  std::uint64_t block_bytes = 0;
  std::vector<std::pair<std::string, std::string>> format;

  std::vector<std::byte> encoded() const;
  // Throws kState (cause kForeign: not such a file; kDamaged), kUnsupported (version).
  static StoreDescription decoded(std::span<const std::byte> bytes);
  // Throws kLayoutMismatch, naming what differs.
  void require(const DiskOptions& options) const;
};

}  // namespace kvpool
