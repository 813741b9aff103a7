// Which ways there are to write into a peer's blocks, from what both sides said of themselves.
//
// Thread-safety: all of it.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kvpool/base/copy.h"
#include "kvpool/pool/peer_blocks.h"
#include "kvpool/pool/service.h"
#include "kvpool/transport/card.h"
#include "kvpool/transport/link.h"
#include "kvpool/transport/route.h"

namespace kvpool {

class UcxContext;

class RouteMaker {
 public:
  // `blocks` outlives it. Throws kArgument for a route that does not exist; kUnsupported when ucx is asked for by name
  // and there is none.
  RouteMaker(const ServiceOptions& options, PeerBlocks& blocks, std::uint64_t epoch);
  ~RouteMaker();

  // What this pool says of itself to one peer: routes, media, ucx, host, pid. Returns what its link is to keep.
  std::shared_ptr<void> introduce(PeerCard& card) const;
  // The arenas' descriptors, in the order of the media that can be mapped.
  std::vector<int> descriptors() const;

  // Every route that both sides can go. Throws kUnsupported when there is none.
  std::vector<std::shared_ptr<Route>> make(const PeerCard& peer, const std::shared_ptr<Link>& link);
  // By what the peer can write here by itself, from what it was given.
  struct Exposure {
    bool by_process = false;  // its process writes, or the kernel for it: its end is the proof that it does not
    bool by_ucx = false;      // UCX writes, also what is on its way: fence() is the proof
    bool any() const noexcept { return by_process || by_ucx; }
  };
  Exposure exposure(const PeerCard& peer, const Link& link) const;
  // Ends what arrives by UCX over this link. May take seconds. False when UCX did not let go.
  static bool fence(const Link& link) noexcept;

 private:
  bool offers(const char* name) const;
  std::shared_ptr<Route> make_one(const std::string& name, const PeerCard& peer, const std::shared_ptr<Link>& link);

  const std::vector<std::string> names_;
  PeerBlocks& blocks_;
  const std::uint64_t epoch_;
  CopyTeam team_;
  std::shared_ptr<UcxContext> ucx_;
};

// Pools of this process, so that they find each other's memory: by epoch.
class ProcessPools {
 public:
  static void add(std::uint64_t epoch, const MediaSpans& spans, std::shared_ptr<void> keepalive);
  static void remove(std::uint64_t epoch) noexcept;
  // Null keepalive: no such pool here.
  static std::shared_ptr<void> find(std::uint64_t epoch, MediaSpans& spans);
};

}  // namespace kvpool
