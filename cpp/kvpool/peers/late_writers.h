// Finds the parties that may still write into the memory of a pool or rank that is closing.
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

// Adds the party, whose link was closed, if it may still write to addresses of this process. Waits at most 2 s for
// threads of the application that place content from the link.
void add_late_writer(const RouteMaker& routes, const std::shared_ptr<DepartingPeer>& party,
                     const std::shared_ptr<Link>& link, std::vector<LateWriter>& late) noexcept;

// Polls until the condition holds or the time has come; returns whether it holds.
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
