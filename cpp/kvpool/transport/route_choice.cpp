#include "kvpool/transport/route_choice.h"

#include <limits>

#include "kvpool/cuda/lasting.h"
#include "kvpool/transport/reactor.h"

namespace kvpool {

Reach reach_of(std::span<const Address> addresses) noexcept {
  Reach reach{};
  for (const Address address : addresses) {
    const std::uint32_t bits = medium_bits_of(address);
    if (bits >= 1 && bits <= kMediaCount) reach[bits - 1] = true;
  }
  return reach;
}

namespace {

bool carries(const Route& route, const Reach& from, const Reach& to) noexcept {
  for (const Medium medium : {Medium::kHbm, Medium::kDram}) {
    const auto at = static_cast<std::size_t>(medium_index(medium));
    if ((from[at] && !route.reads(medium)) || (to[at] && !route.reaches(medium))) return false;
  }
  return true;
}

}  // namespace

std::shared_ptr<Route> cheapest_route(std::span<const std::shared_ptr<Route>> routes, const std::string& name,
                                      std::uint64_t pieces, std::uint64_t bytes, const Reach& from, const Reach& to,
                                      std::int64_t now_ns) {
  std::shared_ptr<Route> best;
  double best_us = std::numeric_limits<double>::infinity();
  int best_rank = 0;
  for (const auto& route : routes) {
    if (!name.empty() && name != route->name()) continue;
    if (!carries(*route, from, to)) continue;
    const bool suits = route->health().able() && route->suits(from, to);
    const int rank = (suits ? 2 : 0) + (suits && route->ready(from, to) ? 1 : 0);
    if (rank < best_rank) continue;
    const double us =
        routes.size() == 1 ? 0.0 : route->estimate_us(from, to, pieces, bytes) * route->health().factor(now_ns);
    if (us < best_us || rank != best_rank) {
      best_us = us;
      best = route;
      best_rank = rank;
    }
  }
  return best;
}

Rivals rivals_between(std::span<const std::shared_ptr<Route>> routes, Medium from, Medium to) {
  Rivals rivals;
  const Reach source = reach_of(from);
  const Reach target = reach_of(to);
  for (const auto& route : routes) {
    if (!carries(*route, source, target) || !route->health().able() || !route->suits(source, target)) continue;
    const RouteTraits traits = route->traits();
    if (!traits.by_caller || route->cost() == nullptr) continue;
    if (!route->is_ready(source, target)) {
      rivals.all = false;
      continue;
    }
    rivals.by_name = rivals.by_name || traits.by_name;
    rivals.routes.push_back(route);
  }
  return rivals;
}

WriteOutcome write_by(Route& route, const WriteRequest& request) {
  const std::int64_t began_ns = monotonic_ns();
  try {
    const WriteOutcome outcome = route.write(request);
    route.health().worked(began_ns);
    return outcome;
  } catch (const Error& error) {
    const Reach from = reach_of(request.from);
    const Reach to = reach_of(request.to);
    // One that has learnt from it what it cannot do serves all else as before.
    const bool learnt =
        !carries(route, from, to) || (error.code() == ErrorCode::kUnsupported && !route.suits(from, to));
    if (learnt) throw;
    if (error.code() != ErrorCode::kUnsupported || is_lasting(error)) {
      route.health().failed(error, began_ns, monotonic_ns());
      throw;
    }
    // One odd answer of the driver, which it may not give again.
    Error failed(ErrorCode::kRouteFailed, error.what());
    for (const auto& [name, value] : error.fields()) failed.add(name, value);
    route.health().failed(failed, began_ns, monotonic_ns());
    throw failed;
  }
}

}  // namespace kvpool
