// The part of a pool that an endpoint sees.
#pragma once

#include <unistd.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kvpool/net/connect/endpoint.h"
#include "kvpool/net/sock_address.h"
#include "sock_fixture.h"
#include "thrown.h"

namespace kvpool::testing {

inline PeerMetadata metadata_of(const std::string& name) {
  PeerMetadata metadata;
  metadata.name = name;
  metadata.instance = 1;
  metadata.incarnation = 77;
  metadata.pid = static_cast<std::uint64_t>(getpid());
  metadata.host = host_id();
  metadata.block_tokens = 16;
  metadata.piece_bytes = {4096};
  metadata.routes = {"sock"};
  return metadata;
}

// The part of a pool that an endpoint sees.
struct Member {
  explicit Member(const std::string& name, EndpointOptions options = {.secret = "sesame"})
      : metadata(metadata_of(name)), reactor(std::make_unique<Reactor>("member")) {
    endpoint = std::make_unique<Endpoint>(
        *reactor, std::move(options), [this] { return Introduction{metadata, descriptors, nullptr}; },
        [this](const std::shared_ptr<Link>& link, const PeerMetadata& peer, bool initiated_here) {
          if (refuse) throw Error(*refuse);
          if (on_admit) on_admit(*link);
          const std::lock_guard lock(mutex);
          links.push_back(link);
          peers.push_back(peer);
          initiated.push_back(initiated_here);
          handlers.push_back(std::make_shared<Recorder>());
          return handlers.back();
        });
  }
  ~Member() {
    endpoint->close();
    for (const auto& link : links) link->close(Error(ErrorCode::kClosed, "the test is over"));
    reactor->stop();
    for (const auto& handler : handlers) CHECK(handler->closed == 1);
  }
  std::size_t admitted() {
    const std::lock_guard lock(mutex);
    return links.size();
  }

  PeerMetadata metadata;
  std::vector<int> descriptors;
  std::optional<Error> refuse;
  std::function<void(Link&)> on_admit;
  std::mutex mutex;
  std::vector<std::shared_ptr<Link>> links;
  std::vector<PeerMetadata> peers;
  std::vector<bool> initiated;
  std::vector<std::shared_ptr<Recorder>> handlers;
  std::unique_ptr<Reactor> reactor;
  std::unique_ptr<Endpoint> endpoint;
};

inline std::string fresh_name(const char* kind) {
  static std::atomic<int> count{0};
  return std::string(kind) + "kvpool-test-" + std::to_string(getpid()) + "-" + std::to_string(++count);
}

class NoPatience final : public Patience {
 public:
  void check() const override {}
};

}  // namespace kvpool::testing
