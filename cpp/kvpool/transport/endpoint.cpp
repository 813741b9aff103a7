#include "kvpool/transport/endpoint.h"

#include <algorithm>

#include "kvpool/base/fork_guard.h"
#include "kvpool/transport/hall.h"
#include "kvpool/transport/visit.h"

namespace kvpool {
namespace {

constexpr std::int64_t kDoorNs = 1'000'000'000;  // a door on the same host answers at once, or is not there

class SockEndpoint final : public Endpoint {
 public:
  explicit SockEndpoint(std::shared_ptr<Hall> hall) : hall_(std::move(hall)), born_(fork_generation()) {}
  ~SockEndpoint() override { close(); }

  std::string listen(const std::string& address) override {
    check_usable();
    return hall_->listen(address);
  }

  std::shared_ptr<Link> connect(const std::string& text, std::int64_t deadline_ns) override {
    check_usable();
    const SockAddress address = parse_address(text);
    if (address.tcp && hall_->options.secret.empty()) {
      throw Error(ErrorCode::kArgument, "connecting to " + text + " needs a secret: TCP carries it to anybody");
    }
    if (hall_->reactor.in_thread()) throw Error(ErrorCode::kState, "a callback of the reactor cannot wait for a peer");
    const VisitPatience patience(*hall_, text, deadline_ns);
    const auto visit = Visit::begin(hall_, address, patience);
    if (const auto by_door = meet_by_door(*visit, address, patience)) {
      visit->leave(Error(ErrorCode::kPeerLost, "met on the same host"));
      return by_door->introduce(patience);
    }
    return visit->introduce(patience);
  }

  void close() noexcept override {
    if (fork_generation() == born_) hall_->close();
  }

 private:
  // A peer on this host that has a Unix door is met through the door; null when there is none, or nobody answers there
  // (it may lie in another network namespace).
  std::shared_ptr<Visit> meet_by_door(Visit& visit, const SockAddress& address, const VisitPatience& patience) {
    const DoorBody& door = visit.door();
    if (!address.tcp || door.door.empty() || door.host != host_id()) return nullptr;
    const SockAddress local{.tcp = false, .path = "@" + door.door, .host = {}, .port = 0};
    const VisitPatience short_patience(*hall_, format_address(local),
                                       std::min(patience.deadline_ns(), monotonic_ns() + kDoorNs));
    try {
      return Visit::begin(hall_, local, short_patience);
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kPeerLost || error.code() == ErrorCode::kDeadline) return nullptr;
      visit.leave(error);
      throw;
    }
  }

  void check_usable() const {
    if (fork_generation() != born_) {
      throw Error(ErrorCode::kFork, "an endpoint belongs to the process that made it");
    }
    if (hall_->closed()) throw Error(ErrorCode::kClosed, "the pool is closed");
  }

  const std::shared_ptr<Hall> hall_;
  const std::uint32_t born_;
};

}  // namespace

std::unique_ptr<Endpoint> Endpoint::make(Reactor& reactor, EndpointOptions options, Introduce introduce, Admit admit) {
  return std::make_unique<SockEndpoint>(
      Hall::make(reactor, std::move(options), std::move(introduce), std::move(admit)));
}

}  // namespace kvpool
