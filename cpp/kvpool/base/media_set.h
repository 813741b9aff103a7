// Which media a write is about.
#pragma once

#include <array>

#include "kvpool/base/medium.h"

namespace kvpool {

using MediaSet = std::array<bool, kMediaCount>;  // by medium_index()

inline constexpr MediaSet media_set_of(Medium medium) noexcept {
  return {medium != Medium::kDram, medium != Medium::kHbm};
}

}  // namespace kvpool
