// Measures the costs of the routes to a peer between two media, by a transfer that is never completed.
//
//   this side                                    the peer
//   takes a few free blocks
//   asks for as many, without eviction ────────▶ reserves them, as for any transfer
//   writes to them, by each route in turn
//   cancels the transfer ──────────────────────▶ frees them
//   frees its blocks
//
// So neither the wire nor the receiver has a special case for it, and all that ends a transfer ends this one as well.
// It takes at most one in kShare blocks on either side, to leave blocks for other callers. If a side is smaller or has
// no free block, or if time runs out, nothing is measured and the guesses stay.
//
// Thread-safety: one thread uses a probe, and blocks while it runs.
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
  static constexpr std::size_t kShare = 8;  // uses at most one in this many blocks of either side's medium
  static constexpr int kRepeats = 3;

  // `routes`: of this session, between the two media.
  RouteProbe(Session& session, Medium from, Medium to, const std::vector<std::shared_ptr<Route>>& routes);

  // Sets the priors of all routes that work, or, at `until_ns`, of none. Leaves nothing behind here or at the peer; if
  // the peer does not answer in time, its reservation ends like that of any cancelled transfer. Failures only affect
  // the health of their route. Throws kCancelled when the caller has given up.
  void run(std::int64_t until_ns, const Waiting& waiting);

 private:
  struct Candidate {
    std::shared_ptr<Route> route;
    std::vector<CostSample> written;  // times until the write had ended
    std::vector<CostSample> arrived;  // times until the peer had placed it; equal for a one-sided route
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
  void set_priors();
  void end(const Waiting& waiting) noexcept;

  Session& session_;
  const Medium from_;
  const Medium to_;
  std::vector<Candidate> candidates_;
  std::uint64_t id_ = 0;            // of the transfer
  bool asked_ = false;              // the peer may hold blocks for it
  bool broken_ = false;             // a write may go on although it has ended: see breaks_route()
  std::vector<Address> addresses_;  // of the peer's blocks
  double answer_us_ = 0;            // the time of an answer alone
};

}  // namespace kvpool
