// Makes the routes to a peer, by every transport that both sides name. What is special about one of them is its own
// (routes/transport.h): nothing here knows a transport by name.
//
// Thread-safety: all of it.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "kvpool/base/address.h"
#include "kvpool/base/copy.h"
#include "kvpool/net/connect/endpoint.h"
#include "kvpool/net/connect/peer_metadata.h"
#include "kvpool/net/link.h"
#include "kvpool/peers/service_options.h"
#include "kvpool/routes/exposure.h"
#include "kvpool/routes/local_memory.h"
#include "kvpool/routes/transports.h"
#include "kvpool/transfer/block_host.h"

namespace kvpool {

class RouteMaker {
 public:
  // `run`: where the receiving halves of routes work that take part of it; without, there are none. Throws kArgument
  // for a route that does not exist, and what a transport says that was asked for by name and cannot be had: see
  // TransportKind. Memory that is not here (of the scheduler of a logical instance) has no routes.
  RouteMaker(const ServiceOptions& options, LocalMemory memory, std::uint64_t incarnation, RouteRun run = {},
             std::span<const TransportKind> kinds = all_transports());
  ~RouteMaker();
  RouteMaker(const RouteMaker&) = delete;
  RouteMaker& operator=(const RouteMaker&) = delete;

  // What a transport leaves out of this pool's memory, and why.
  const std::vector<std::string>& notes() const noexcept { return notes_; }

  // The pool is closed: keeps and registers its memory no longer, and is asked nothing more.
  void let_go() noexcept;
  // Throws kClosed once it was let go of.
  LocalMemory memory() const;

  // What this pool says of itself to one peer: its memory, host and pid, and what its transports offer. Throws kClosed.
  Introduction introduce() const;

  // For content that a link brings for these blocks of this memory: as BlockHost::staging_buffer. Throws kClosed, too.
  std::unique_ptr<StagingBuffer> staging_buffer(std::span<const Address> blocks, std::vector<iovec>& pieces,
                                                std::uint64_t bytes) const;

  // Every route that both sides can go. Throws kUnsupported when there is none, kClosed.
  std::vector<std::shared_ptr<Route>> make(const PeerMetadata& peer, const std::shared_ptr<Link>& link) const;
  // By what the peer can write here by itself, from what it was given.
  Exposure exposure(const PeerMetadata& peer, const std::shared_ptr<Link>& link) const;
  // Ends what arrives through what transports have granted to the peer of this link. May take seconds. False when one
  // of them proves nothing.
  static bool fence(const Link& link) noexcept;

 private:
  struct Named {
    const char* name;
    std::unique_ptr<Transport> transport;
  };
  void add_transports(const std::vector<TransportKind>& kinds, const ServiceOptions& options, RouteRun run);

  const std::uint64_t incarnation_;
  CopyTeam team_;
  std::vector<std::string> names_;  // of the transports, also where the memory is elsewhere; set by the constructor
  std::vector<std::string> notes_;  // likewise
  mutable std::mutex mutex_;
  LocalMemory memory_;             // under mutex_; none once it was let go of
  std::vector<Named> transports_;  // set by the constructor
};

}  // namespace kvpool
