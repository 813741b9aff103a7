// How many descriptors this process has open.
#pragma once

#include <filesystem>
#include <iterator>

namespace kvpool::testing {

inline int open_descriptors() {
  return static_cast<int>(std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {}));
}

}  // namespace kvpool::testing
