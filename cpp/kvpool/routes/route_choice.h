// Chooses the route of a write among several to one peer.
//
// Pure but for the routes' own estimates. Thread-safety: as theirs.
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
// writes, and among these the ones that are ready. A recent failure makes a route dearer: see RouteHealth. `now_ns`:
// CLOCK_MONOTONIC.
std::shared_ptr<Route> cheapest_route(std::span<const std::shared_ptr<Route>> routes, const std::string& name,
                                      std::uint64_t pieces, std::uint64_t bytes, const MediaSet& from,
                                      const MediaSet& to, std::int64_t now_ns);

// The routes among which cheapest_route() chooses between two media while all of them work. If there are several,
// measuring them is better than trusting their guesses. Leaves out routes that must not run in a caller's thread: they
// take long to get ready, and get ready with the first write.
struct RouteCandidates {
  std::vector<std::shared_ptr<Route>> routes;
  bool by_name = false;  // one of them is a route that the settings have to name
  bool all = true;       // false: others would be among them, and are not ready yet
};
RouteCandidates candidates_between(std::span<const std::shared_ptr<Route>> routes, Medium from, Medium to);

// Writes by this route and reports the outcome to its health, unless the route from then on refuses such writes itself.
// Throws what Route::write throws; kRouteFailed for kUnsupported that may be another time: see is_lasting().
WriteOutcome write_by(Route& route, const WriteRequest& request);

}  // namespace kvpool
