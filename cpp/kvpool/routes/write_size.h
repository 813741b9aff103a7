// How much a write moves, and how: what its cost depends on.
#pragma once

#include <cstdint>

namespace kvpool {

struct WriteSize {
  std::uint64_t pieces = 0;
  std::uint64_t bytes = 0;
  bool gather = true;  // as in WriteRequest
};

}  // namespace kvpool
