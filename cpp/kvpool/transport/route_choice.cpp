#include "kvpool/transport/route_choice.h"

#include <limits>

namespace kvpool {

Reach reach_of(std::span<const Address> addresses) noexcept {
  Reach reach{};
  for (const Address address : addresses) {
    const std::uint32_t bits = medium_bits_of(address);
    if (bits >= 1 && bits <= kMediaCount) reach[bits - 1] = true;
  }
  return reach;
}

std::shared_ptr<Route> cheapest_route(std::span<const std::shared_ptr<Route>> routes, const std::string& name,
                                      std::uint64_t pieces, std::uint64_t bytes, const Reach& reach) {
  std::shared_ptr<Route> best;
  double best_us = std::numeric_limits<double>::infinity();
  for (const auto& route : routes) {
    if (!name.empty() && name != route->name()) continue;
    if ((reach[0] && !route->reaches(Medium::kHbm)) || (reach[1] && !route->reaches(Medium::kDram))) continue;
    const double us = routes.size() == 1 ? 0.0 : route->estimate_us(pieces, bytes);
    if (us < best_us) {
      best_us = us;
      best = route;
    }
  }
  return best;
}

}  // namespace kvpool
