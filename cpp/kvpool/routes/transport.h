// A transport: one way into the memory of peers, with everything that has to be known of it in one folder.
//
// Two pools go by a transport when both name it. Then it says what this pool gives the peer (offer), makes the routes
// by which this pool writes (connect), and says what the peer can write here by itself (exposure). Code that makes
// routes goes through a list of transports (transports.h), and knows none of them by name.
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

// What a transport has made for one peer alone. The peer's link keeps it, and it may outlive the transport.
class Grant {
 public:
  virtual ~Grant() = default;
  // Ends what arrives from the peer through this grant: once it has returned true, nothing of that is written any more.
  // False: nothing is proved. May take seconds. Idempotent.
  virtual bool fence() noexcept = 0;
};

// What this pool tells one peer. `files`: with which the peer can map a medium, -1 for none; whoever set one owns it,
// until Transport::let_go().
struct Offer {
  PeerMetadata& metadata;
  MediaFiles files = kNoFiles;

  // Of host memory that the pool owns.
  void add_host_files(const LocalMemory& memory) noexcept;
};

// A peer as transports see it.
struct PeerEnd {
  const PeerMetadata& metadata;
  const std::shared_ptr<Link>& link;
  bool same_host = false;  // its pids mean the same as here

  // It is this process, by the kernel's word. Its own word does not count: a process that names another pool's
  // incarnation would have that pool's blocks written. Over TCP the kernel says nothing.
  bool is_here() const noexcept;
  // Descriptors can be passed between the two.
  bool is_local() const;
  bool has_gpu() const noexcept;
  // The descriptors that came with its metadata, by medium.
  MediaFiles files() const;
};

using Routes = std::vector<std::shared_ptr<Route>>;

class Transport {
 public:
  virtual ~Transport() = default;

  // Adds to what the peer is told. Returns what was made for this peer alone, null if nothing was. Throws kClosed, and
  // what its own resources fail with.
  virtual std::shared_ptr<Grant> offer(const LocalMemory& /*memory*/, Offer& /*offer*/) { return nullptr; }
  // Adds the routes by which this pool can write to the peer; none where it cannot. `grant`: of offer() to this peer.
  // Throws why it cannot, where a person should know; what was added before stays. REQUIRES: the peer names this
  // transport, too.
  virtual void connect(const LocalMemory& memory, const PeerEnd& peer, Grant* grant, Routes& routes) = 0;
  // What the peer can write here by itself, also after let_go(). REQUIRES: as connect().
  virtual Exposure exposure(const PeerEnd& /*peer*/) const { return {}; }
  // The pool is closed: gives back what it holds of its memory. offer() and connect() are not called any more, but
  // calls may be under way.
  virtual void let_go() noexcept {}
};

// What a transport is made with.
struct TransportSetup {
  const TransportSettings& settings;
  std::uint64_t incarnation;        // of this pool
  const LocalMemory& memory;        // it has memory, that is: not the scheduler of a logical instance
  CopyTeam& team;                   // outlives the transport
  RouteRun run;                     // where the receiving halves of routes work; empty: nowhere
  std::vector<std::string>& notes;  // for a log: what was asked for and cannot be had in full, and why
};

struct TransportKind {
  const char* name;  // of its routes, in the settings and in the metadata
  // Used without being named. If it cannot be had, it is left out with a note; the others fail.
  bool by_default;
  // Throws why it cannot be had.
  std::unique_ptr<Transport> (*make)(const TransportSetup& setup);
};

}  // namespace kvpool
