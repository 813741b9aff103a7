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

  std::shared_ptr<Link> connect(const std::string& text, const Waiting& waiting, std::uint64_t meeting) override {
    check_usable();
    check_connect_address(text, !hall_->options.secret.empty());
    const SockAddress address = parse_address(text);
    if (hall_->reactor.in_thread()) throw Error(ErrorCode::kState, "a callback of the reactor cannot wait for a peer");
    const VisitPatience patience(*hall_, text, waiting);
    const auto visit = Visit::begin(hall_, address, patience);
    if (const auto by_door = meet_by_door(*visit, address, patience)) {
      visit->leave(Error(ErrorCode::kPeerLost, "met on the same host"));
      return by_door->introduce(patience, meeting);
    }
    return visit->introduce(patience, meeting);
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
    const VisitPatience short_patience(
        *hall_, format_address(local),
        {std::min(patience.deadline_ns(), monotonic_ns() + kDoorNs), patience.waiting().given_up});
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

void check_listen_address(const std::string& address, bool has_secret) {
  if (parse_address(address).tcp && !has_secret) {
    throw Error(ErrorCode::kArgument, "listening at " + address + " needs a secret: anybody can reach a TCP port");
  }
}

void check_connect_address(const std::string& address, bool has_secret) {
  if (parse_address(address).tcp && !has_secret) {
    throw Error(ErrorCode::kArgument, "connecting to " + address + " needs a secret: TCP carries it to anybody");
  }
}

std::unique_ptr<Endpoint> Endpoint::make(Reactor& reactor, EndpointOptions options, Introduce introduce, Admit admit) {
  return std::make_unique<SockEndpoint>(
      Hall::make(reactor, std::move(options), std::move(introduce), std::move(admit)));
}

}  // namespace kvpool
