// The settings of the route nccl.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvpool {

// The limits of a sender's pass: a receiver allocates as much memory for a peer as a pass needs.
inline constexpr std::uint64_t kNcclPassBytesMax = std::uint64_t{256} << 20;
inline constexpr std::uint64_t kNcclPassBytesMin = std::uint64_t{1} << 20;
// The most passes that a receiver keeps for a peer until they are answered. Senders of ours announce one at a time.
inline constexpr std::size_t kNcclPassesMax = 16;
// The most communicators that wait to be joined. A sender of ours opens another only when it has left the one before.
inline constexpr std::size_t kNcclChannelsMax = 16;

struct NcclLimits {
  // The size of a pass. The sender gathers into a buffer of this size, and the receiver scatters from one, so each
  // allocates that much GPU memory for a direction when the first content is sent.
  std::uint64_t pass_bytes = std::uint64_t{16} << 20;
  // The longest time until a communicator is complete; then the route has failed.
  std::int64_t init_ns = 10'000'000'000;
  // The longest time that a receiver waits for a pass, whatever lifetime its sender gives it: it holds a thread.
  std::int64_t pass_ns = 60'000'000'000;
  // The most thread blocks that a communicator may use on the GPU; 0: NCCL decides.
  int thread_blocks_max = 0;
};

}  // namespace kvpool
