// Who may still write into memory that is about to be given back: what a pool, or a rank, asks when it closes.
#pragma once

#include <unistd.h>

#include <memory>
#include <vector>

#include "kvpool/base/clock.h"
#include "kvpool/net/link.h"
#include "kvpool/net/reactor.h"
#include "kvpool/peers/retained_memory.h"
#include "kvpool/peers/route_maker.h"
#include "kvpool/transfer/departing_peer.h"

namespace kvpool {

// Adds the party, whose link was closed, if it may still write to addresses of this process. Waits for at most 2 s for
// threads of the application that place what came over the link.
void add_late_writer(const RouteMaker& routes, const std::shared_ptr<DepartingPeer>& party,
                     const std::shared_ptr<Link>& link, std::vector<LateWriter>& late) noexcept;

// Looks until it holds, or until the time comes; returns whether it does.
template <class Holds>
bool wait_until(std::int64_t until_ns, Holds&& holds) {
  constexpr useconds_t kLookUs = 200;
  while (!holds()) {
    if (monotonic_ns() >= until_ns) return false;
    usleep(kLookUs);
  }
  return true;
}

}  // namespace kvpool
