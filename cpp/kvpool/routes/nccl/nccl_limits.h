// What can be set about the route nccl.
#pragma once

#include <cstdint>

namespace kvpool {

// The limits of a pass, for every sender: a receiver allocates as much memory for a peer as a pass asks for.
inline constexpr std::uint64_t kNcclPassBytesMax = std::uint64_t{256} << 20;
inline constexpr std::uint64_t kNcclPassBytesMin = std::uint64_t{1} << 20;

struct NcclLimits {
  // At most so much is sent at a time. It is what the sender gathers into and the receiver scatters from, so each takes
  // that much of its GPU for a direction, when the first content goes there.
  std::uint64_t pass_bytes = std::uint64_t{16} << 20;
  // For a communicator to be complete; then the route has failed.
  std::int64_t init_ns = 10'000'000'000;
  // Thread blocks of the GPU that a communicator may keep busy; 0 leaves it to NCCL.
  int thread_blocks_max = 0;
};

}  // namespace kvpool
