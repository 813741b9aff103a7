// The pools of this process by incarnation, so that they find each other's memory.
//
// Thread-safety: all of it.
#pragma once

#include <cstdint>
#include <optional>

#include "kvpool/routes/local_memory.h"

namespace kvpool {

class ProcessPools {
 public:
  static void add(std::uint64_t incarnation, const LocalMemory& memory);
  static void remove(std::uint64_t incarnation) noexcept;
  static std::optional<LocalMemory> find(std::uint64_t incarnation);
};

}  // namespace kvpool
