// Messages that every reader must refuse.
#pragma once

#include <doctest/doctest.h>

#include <cstddef>

#include "kvpool/base/error.h"
#include "kvpool/net/wire.h"

namespace kvpool::testing {

// Every message that is cut short, or goes on behind its end, is refused.
template <class Read>
void check_length(Bytes bytes, Read&& read) {
  CHECK_NOTHROW(read(bytes));
  for (std::size_t n = 0; n < bytes.size(); ++n) {
    CHECK_THROWS_AS(read(Bytes(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(n))), Error);
  }
  bytes.push_back(std::byte{0});
  CHECK_THROWS_AS(read(bytes), Error);
}

}  // namespace kvpool::testing
