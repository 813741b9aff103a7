#include "kvpool/routes/route_choice.h"

#include <algorithm>
#include <limits>

#include "kvpool/base/clock.h"
#include "kvpool/net/reactor.h"
#include "kvpool/routes/route_error.h"

namespace kvpool {

MediaSet media_set_of(std::span<const Address> addresses) noexcept {
  MediaSet reach{};
  for (const Address address : addresses) {
    const std::uint32_t bits = medium_bits_of(address);
    if (is_medium(bits)) reach[static_cast<Medium>(bits)] = true;
  }
  return reach;
}

namespace {

bool carries(const Route& route, const MediaSet& from, const MediaSet& to) noexcept {
  return std::ranges::all_of(kMedia, [&](Medium medium) {
    return (!from[medium] || route.reads(medium)) && (!to[medium] || route.reaches(medium));
  });
}

}  // namespace

std::shared_ptr<Route> cheapest_route(std::span<const std::shared_ptr<Route>> routes, const std::string& name,
                                      const WriteSize& size, const MediaSet& from, const MediaSet& to,
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
        routes.size() == 1 ? 0.0 : route->estimate_us(from, to, size, now_ns) * route->health().factor(now_ns);
    if (us < best_us || rank != best_rank) {
      best_us = us;
      best = route;
      best_rank = rank;
    }
  }
  return best;
}

RouteCandidates candidates_between(std::span<const std::shared_ptr<Route>> routes, Medium from, Medium to) {
  RouteCandidates candidates;
  const MediaSet source = media_set_of(from);
  const MediaSet target = media_set_of(to);
  for (const auto& route : routes) {
    if (!carries(*route, source, target) || !route->health().able() || !route->suits(source, target)) continue;
    const RouteTraits traits = route->traits();
    if (!traits.by_caller || route->cost() == nullptr) continue;
    if (!route->is_ready(source, target)) {
      candidates.all = false;
      continue;
    }
    candidates.by_name = candidates.by_name || traits.by_name;
    candidates.routes.push_back(route);
  }
  return candidates;
}

WriteOutcome write_by(Route& route, const WriteRequest& request) {
  const std::int64_t began_ns = monotonic_ns();
  try {
    const WriteOutcome outcome = route.write(request);
    route.health().worked(began_ns);
    return outcome;
  } catch (const Error& error) {
    const MediaSet from = media_set_of(request.from);
    const MediaSet to = media_set_of(request.to);
    // One that has learnt from it what it cannot do serves all else as before.
    const bool learnt =
        !carries(route, from, to) || (error.code() == ErrorCode::kUnsupported && !route.suits(from, to));
    if (learnt) throw;
    const Error failed = route_error(error);  // the driver may not give one odd answer again
    route.health().failed(failed, began_ns, monotonic_ns());
    throw failed;
  }
}

}  // namespace kvpool
