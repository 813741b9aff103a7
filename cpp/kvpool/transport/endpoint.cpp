#include "kvpool/transport/endpoint.h"

#include <algorithm>

#include "kvpool/base/fork_guard.h"
#include "kvpool/transport/hall.h"
#include "kvpool/transport/visit.h"

namespace kvpool {
namespace {

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
    if (!has_door_here(visit->door(), address)) return visit->introduce(patience, meeting);
    const SockAddress door{.tcp = false, .path = "@" + visit->door().door, .host = {}, .port = 0};
    visit->leave(Error(ErrorCode::kPeerLost, "met on the same host"));
    return enter_by(door, text, waiting)->introduce(patience, meeting);
  }

  void close() noexcept override {
    if (fork_generation() == born_) hall_->close();
  }

 private:
  // Whether the peer is on this host and can be met over a Unix socket.
  bool has_door_here(const DoorBody& door, const SockAddress& address) const {
    return address.tcp && hall_->options.door && !door.door.empty() && door.place == door_place();
  }

  // The peer itself has told of this door, under a MAC. If it does not answer, somebody may be in the way who wants the
  // two to meet by TCP: that is never done in silence.
  std::shared_ptr<Visit> enter_by(const SockAddress& door, const std::string& address, const Waiting& waiting) {
    const std::string name = format_address(door);
    try {
      return Visit::begin(hall_, door, VisitPatience(*hall_, name, waiting));
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kPeerLost && error.code() != ErrorCode::kDeadline) throw;
      throw Error(error.code(), "the peer at " + address + " is on this host, and its Unix door " + name +
                                    " does not let this side in: " + error.what() +
                                    ". With the setting unix_door off on either side the two meet by TCP");
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
