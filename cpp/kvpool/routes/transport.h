// A transport: one way to access the memory of peers, with all of its code in one folder.
//
// Two pools use a transport if both name it. The transport then decides what this pool gives the peer (offer), makes
// the routes by which this pool writes (connect), and says how the peer can write here by itself (exposure). Code that
// makes routes iterates over a list of transports (transports.h), and knows no transport by name.
//
// Thread-safety: all of it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kvpool/base/copy.h"
#include "kvpool/net/connect/peer_metadata.h"
#include "kvpool/net/link.h"
#include "kvpool/routes/exposure.h"
#include "kvpool/routes/local_memory.h"
#include "kvpool/routes/peer_memory.h"
#include "kvpool/routes/route.h"
#include "kvpool/routes/route_receiver.h"
#include "kvpool/routes/transport_settings.h"

namespace kvpool {

// What a transport has made for one peer. The peer's link keeps it, and it may outlive the transport.
class Grant {
 public:
  virtual ~Grant() = default;
  // Ends writes that arrive from the peer through this grant: after it has returned true, they no longer write.
  // False: that is not proved. May take seconds. Idempotent.
  virtual bool fence() noexcept = 0;
};

// What this pool offers one peer. `files`: descriptors with which the peer can map a medium, or -1; the transport that
// sets one owns it, until Transport::let_go().
struct Offer {
  PeerMetadata& metadata;
  MediaFiles files = kNoFiles;

  // Adds the files of host memory that the pool owns.
  void add_host_files(const LocalMemory& memory) noexcept;
};

// A peer as transports see it.
struct PeerEnd {
  const PeerMetadata& metadata;
  const std::shared_ptr<Link>& link;
  bool same_host = false;  // it has the same host and PID namespace

  // Whether the peer is this process, according to the kernel. The peer's claim is not enough: a process that claims
  // another pool's incarnation would cause writes into that pool's blocks. Over TCP the kernel does not know.
  bool is_here() const noexcept;
  // Whether descriptors can be passed between the two.
  bool is_local() const;
  bool has_gpu() const noexcept;
  // The descriptors that came with its metadata, by medium.
  MediaFiles files() const;
};

using Routes = std::vector<std::shared_ptr<Route>>;

class Transport {
 public:
  virtual ~Transport() = default;

  // Adds to the offer. Returns what was made for this peer only, if anything. Throws kClosed, and errors of its
  // resources.
  virtual std::shared_ptr<Grant> offer(const LocalMemory& /*memory*/, Offer& /*offer*/) { return nullptr; }
  // Adds the routes by which this pool can write to the peer, if any. `grant`: of offer() to this peer. Throws the
  // reason if it adds none and the user should know why; routes that it has added stay. REQUIRES: the peer names this
  // transport, too.
  virtual void connect(const LocalMemory& memory, const PeerEnd& peer, Grant* grant, Routes& routes) = 0;
  // How the peer can write here by itself, also after let_go(). REQUIRES: as connect().
  virtual Exposure exposure(const PeerEnd& /*peer*/) const { return {}; }
  // Whether what the peer can write by this transport is the files of its offer alone: not what the pool has adopted.
  virtual bool writes_files_only() const noexcept { return false; }
  // The pool is closed: releases the pool's memory. No later offer() or connect() follows, but calls may be under way.
  virtual void let_go() noexcept {}
};

// The arguments for making a transport.
struct TransportSetup {
  const TransportSettings& settings;
  std::uint64_t incarnation;        // of this pool
  const LocalMemory& memory;        // not empty: transports are not made for the scheduler of a logical instance
  CopyTeam& team;                   // outlives the transport
  RouteRun run;                     // runs the receiving halves of routes; empty: there are no such halves
  std::vector<std::string>& notes;  // for a log: requested features that are only partly available, and why
};

struct TransportKind {
  const char* name;  // of its routes, in the settings and in the metadata
  // Used without being named. If it is not available, it is left out with a note; a named one fails.
  bool by_default;
  // Throws why it is not available.
  std::unique_ptr<Transport> (*make)(const TransportSetup& setup);
  // Whether it finds the pieces of blocks that are cut, on both sides: a peer in another process would have to be told.
  bool finds_pieces = false;
};

}  // namespace kvpool
