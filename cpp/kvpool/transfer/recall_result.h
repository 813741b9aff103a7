// The result of a recall of lent blocks.
#pragma once

#include <cstdint>

namespace kvpool {

struct RecallResult {
  std::uint32_t returned = 0;     // given back or inserted
  std::uint32_t freed = 0;        // taken back at the deadline; nothing can write them
  std::uint32_t quarantined = 0;  // taken back at the deadline; the borrower may still write or read them
};

}  // namespace kvpool
