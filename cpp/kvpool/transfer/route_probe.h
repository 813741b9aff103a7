// Measuring what the routes to a peer cost between two media: bytes are moved that nobody is told of.
//
//   this side                                    the peer
//   takes a few free blocks
//   asks for as many, which may not evict ─────▶ reserves them, as for any transfer
//   writes to them, by each route in turn
//   says that the transfer will not be ────────▶ has them back
//   gives its own back
//
// So the wire and the receiver know nothing of it, and whatever ends a transfer leaves as little of this one. It takes
// at most one block of kShare on either side, as somebody may be about to ask for the last ones. Where either side is
// smaller, or has no free block, nothing is measured, and the guesses stay, as they do where the time did not do.
//
// Thread-safety: a probe belongs to one thread, which it keeps while it lasts.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kvpool/base/wait.h"
#include "kvpool/routes/cost_fit.h"
#include "kvpool/routes/route.h"
#include "kvpool/transfer/session.h"

namespace kvpool {

class RouteProbe {
 public:
  static constexpr std::uint64_t kBytesMax = std::uint64_t{4} << 20;       // of a write
  static constexpr std::uint64_t kBlockBytesMax = std::uint64_t{1} << 20;  // of a block
  static constexpr std::size_t kBlocksMax = 32;
  static constexpr std::size_t kShare = 8;  // one block of so many, of either side's medium
  static constexpr int kRepeats = 3;

  // `routes`: of this session, from the one medium to the other.
  RouteProbe(Session& session, Medium from, Medium to, const std::vector<std::shared_ptr<Route>>& routes);

  // Until then. All of the routes that work are settled, or none. When it returns nothing of it is left here, nor at
  // the peer, unless that does not answer in time: then what is there ends as any transfer that was given up. What
  // fails is heard by the route's health, and nobody else. Throws kCancelled when the caller has given up.
  void run(std::int64_t until_ns, const Waiting& waiting);

 private:
  struct Candidate {
    std::shared_ptr<Route> route;
    std::vector<CostSample> written;  // until the write had ended
    std::vector<CostSample> arrived;  // until the peer had placed it; of a one-sided route that is the same
    double whole_us = 0;              // of the last whole block
    bool out = false;                 // it has failed
  };
  struct Size {
    std::size_t blocks;
    std::uint64_t bytes;  // of each of them
  };
  class OwnBlocks;

  std::size_t blocks_max() const noexcept;
  bool reserve(std::size_t blocks, const Waiting& waiting);
  std::vector<Size> sizes() const;
  void sample_all(std::span<const Address> own, std::int64_t until_ns, const Waiting& waiting);
  void sample(Candidate& candidate, const Size& size, std::span<const Address> own, const Waiting& waiting);
  double answer_us(const Waiting& waiting);
  void settle();
  void end(const Waiting& waiting) noexcept;

  Session& session_;
  const Medium from_;
  const Medium to_;
  std::vector<Candidate> candidates_;
  std::uint64_t id_ = 0;            // of the transfer that will not be
  bool asked_ = false;              // the peer may hold blocks for it
  bool broken_ = false;             // a write may go on although it has ended: see breaks_route()
  std::vector<Address> addresses_;  // there
  double answer_us_ = 0;            // what an answer takes by itself
};

}  // namespace kvpool
