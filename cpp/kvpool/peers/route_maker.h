// Makes the routes to a peer, with every transport that both sides have. Nothing here knows a transport by name; its
// peculiarities are behind routes/transport.h.
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
#include "kvpool/exec/copy_threads.h"
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
  // The executor outlives it. `run` runs work of receiving halves of routes; without it, routes have no receiving
  // halves. Throws kArgument for an unknown route, and the error of a transport that was requested by name and is not
  // available: see TransportKind. Memory in other processes (of the scheduler of a logical instance) has no routes.
  RouteMaker(const ServiceOptions& options, LocalMemory memory, std::uint64_t incarnation, Executor& executor,
             RouteRun run = {}, std::span<const TransportKind> kinds = all_transports());
  ~RouteMaker();
  RouteMaker(const RouteMaker&) = delete;
  RouteMaker& operator=(const RouteMaker&) = delete;

  // Which parts of this pool's memory a transport leaves out, and why.
  const std::vector<std::string>& notes() const noexcept { return notes_; }

  // The pool is closed: releases and unregisters its memory. No other call may follow.
  void let_go() noexcept;
  // Throws kClosed after let_go().
  LocalMemory memory() const;

  // Describes this pool to one peer: its memory, host and pid, and what its transports offer. Throws kClosed.
  Introduction introduce() const;

  // For content from a link for these blocks: as BlockHost::staging_buffer. Also throws kClosed.
  std::unique_ptr<StagingBuffer> staging_buffer(std::span<const Address> blocks, std::vector<iovec>& pieces,
                                                std::uint64_t bytes) const;

  // Every route that both sides support. Throws kUnsupported when no route is possible, kClosed.
  std::vector<std::shared_ptr<Route>> make(const PeerMetadata& peer, const std::shared_ptr<Link>& link) const;
  // Copies from a peer's blocks that are mapped here into this pool's: see make_reader(). Throws kClosed.
  std::unique_ptr<Route> reader(const std::shared_ptr<const MediaSpans>& from);
  // How the peer can write here by itself, with the access that it was given.
  Exposure exposure(const PeerMetadata& peer, const std::shared_ptr<Link>& link) const;
  // Ends writes that arrive through access that transports have granted to the peer of this link. May take seconds.
  // False when a transport cannot prove the end.
  static bool fence(const Link& link) noexcept;

 private:
  struct Named {
    const char* name;
    std::unique_ptr<Transport> transport;
  };
  void add_transports(const std::vector<TransportKind>& kinds, const ServiceOptions& options, RouteRun run);

  const std::uint64_t incarnation_;
  CopyThreads copiers_;
  std::vector<std::string> names_;  // of the transports, also where the memory is elsewhere; set by the constructor
  std::vector<std::string> notes_;  // likewise
  mutable std::mutex mutex_;
  LocalMemory memory_;             // under mutex_; empty after let_go()
  std::vector<Named> transports_;  // set by the constructor
};

}  // namespace kvpool
