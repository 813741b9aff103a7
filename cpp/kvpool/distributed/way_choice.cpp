#include "kvpool/distributed/way_choice.h"

#include <algorithm>
#include <cstddef>

#include "kvpool/base/pace.h"

namespace kvpool {
namespace {

constexpr double kUnmeasuredNsPerByte = 0.1;  // 10 GB/s: what one thread reads
constexpr std::int64_t kTryAgainNs = 1'000'000'000;

double here_ns(const Pace& pace, std::uint64_t bytes) noexcept {
  if (bytes == 0) return 0;
  const auto units = static_cast<double>(bytes);
  return pace.estimate_ns(units).value_or(units * kUnmeasuredNsPerByte);
}

}  // namespace

std::vector<bool> read_from_here(std::uint64_t own_bytes, const Pace& here, const std::vector<PeerOption>& peers,
                                 std::int64_t now_ns) {
  std::vector<bool> from_here(peers.size(), false);
  std::vector<double> there_ns(peers.size());
  for (std::size_t i = 0; i < peers.size(); ++i) {
    const Pace& pace = *peers[i].pace;
    // Before the first call to a peer nothing is known, and after a while it may have changed.
    const bool known = pace.last_ns() > 0 && now_ns - pace.last_ns() < kTryAgainNs;
    there_ns[i] = known ? pace.estimate_ns(static_cast<double>(peers[i].bytes)).value_or(0) : 0;
  }
  const auto slowest_there = [&] {
    double slowest = 0;
    for (std::size_t i = 0; i < peers.size(); ++i) {
      if (!from_here[i]) slowest = std::max(slowest, there_ns[i]);
    }
    return slowest;
  };
  std::uint64_t bytes = own_bytes;
  for (;;) {
    const double now = std::max(here_ns(here, bytes), slowest_there());
    std::size_t best = peers.size();
    for (std::size_t i = 0; i < peers.size(); ++i) {
      if (from_here[i] || !peers[i].readable) continue;
      if (best == peers.size() || there_ns[i] > there_ns[best]) best = i;
    }
    if (best == peers.size()) return from_here;
    from_here[best] = true;
    if (std::max(here_ns(here, bytes + peers[best].bytes), slowest_there()) >= now) {
      from_here[best] = false;
      return from_here;
    }
    bytes += peers[best].bytes;
  }
}

}  // namespace kvpool
