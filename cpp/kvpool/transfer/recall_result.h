// What has become of lent blocks that were recalled.
#pragma once

#include <cstdint>

namespace kvpool {

struct RecallResult {
  std::uint32_t returned = 0;     // given back, or gone to the index
  std::uint32_t freed = 0;        // taken back: nobody can write them any more
  std::uint32_t quarantined = 0;  // taken back, and the borrower may still write them
};

}  // namespace kvpool
