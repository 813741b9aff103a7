// Which of several ways to a peer a write takes.
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

// The one that is expected to take the least time, among those of this name ("": any) that read the ones and reach the
// others of these media; null when there is none. Of them one that reaches this peer and is made for such writes, if
// there is any, and of these one that is ready; one that has failed just now is dearer: see RouteHealth. `now_ns`:
// CLOCK_MONOTONIC.
std::shared_ptr<Route> cheapest_route(std::span<const std::shared_ptr<Route>> routes, const std::string& name,
                                      std::uint64_t pieces, std::uint64_t bytes, const MediaSet& from,
                                      const MediaSet& to, std::int64_t now_ns);

// Among which cheapest_route() chooses between two media while all of them work: if there are several, to measure them
// says more than their guesses. Not those that a caller's thread has to keep out of: they take long to get ready, and
// the first write is when.
struct RouteCandidates {
  std::vector<std::shared_ptr<Route>> routes;
  bool by_name = false;  // one of them is a route that the settings have to name
  bool all = true;       // false: others would be among them, and are not ready yet
};
RouteCandidates candidates_between(std::span<const std::shared_ptr<Route>> routes, Medium from, Medium to);

// Writes by it, and tells its health how that went, unless the route itself says from then on that it does not do such
// writes. Throws what Route::write throws; kRouteFailed for kUnsupported that may be another time: see is_lasting().
WriteOutcome write_by(Route& route, const WriteRequest& request);

}  // namespace kvpool
