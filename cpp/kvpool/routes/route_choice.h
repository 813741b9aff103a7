// Chooses the route of a write among several to one peer.
//
// Pure except for the routes' estimates. Thread-safety: that of the routes.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvpool/base/address.h"
#include "kvpool/base/medium.h"
#include "kvpool/routes/route.h"

namespace kvpool {

MediaSet media_set_of(std::span<const Address> addresses) noexcept;

// Returns the route with the least expected time, among those of this name ("": any) that can read the source medium
// and reach the target medium; null if no route can. Prefers routes that work for this peer and are made for such
// writes, and among these the ones that are ready. A recent failure raises a route's cost: see RouteHealth. `now_ns`:
// CLOCK_MONOTONIC.
std::shared_ptr<Route> cheapest_route(std::span<const std::shared_ptr<Route>> routes, const std::string& name,
                                      const WriteSize& size, const MediaSet& from, const MediaSet& to,
                                      std::int64_t now_ns);

// The routes among which cheapest_route() chooses between two media while all of them work. If there are several,
// measuring them is better than trusting their guesses. Leaves out routes that must not run in a caller's thread,
// because they get ready with the first write, which takes long.
struct RouteCandidates {
  std::vector<std::shared_ptr<Route>> routes;
  bool by_name = false;  // a candidate must be named in the settings
  bool all = true;       // false: further routes are candidates, but not ready yet
};
RouteCandidates candidates_between(std::span<const std::shared_ptr<Route>> routes, Medium from, Medium to);

// Writes by this route and reports the outcome to its health, unless the route itself refuses such writes from then on.
// Throws what Route::write throws, but kRouteFailed instead of a kUnsupported that is not permanent: see is_lasting().
WriteOutcome write_by(Route& route, const WriteRequest& request);

}  // namespace kvpool
