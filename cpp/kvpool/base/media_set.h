// A set of media: those that a write touches.
#pragma once

#include "kvpool/base/medium.h"

namespace kvpool {

using MediaSet = MediumMap<bool>;

inline constexpr MediaSet media_set_of(MediumChoice choice) noexcept {
  MediaSet set{};
  for (const Medium medium : kMedia) set[medium] = choice.includes(medium);
  return set;
}

}  // namespace kvpool
