// The half of a pool that speaks with its peers.
//
// One C++ thread (the reactor) answers peers and keeps leases; it never needs Python's GIL. Worker threads write what
// is large, for one peer after another; steps that take long for a peer, as making room, have threads that no content
// can fill. Thread-safety: everything here may be called by several threads; everything that waits has a deadline.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kvpool/base/address.h"
#include "kvpool/base/wait.h"
#include "kvpool/index/pins.h"
#include "kvpool/peers/address_book.h"
#include "kvpool/peers/instance_ranks.h"
#include "kvpool/peers/peer_events.h"
#include "kvpool/routes/route_cost.h"
#include "kvpool/routes/route_health.h"
#include "kvpool/routes/transport_settings.h"
#include "kvpool/transfer/handle.h"
#include "kvpool/transfer/recall_result.h"
#include "kvpool/transfer/request.h"
#include "kvpool/transfer/tally.h"

namespace kvpool {

class Pool;

struct ServiceOptions {
  std::string name;                               // "": host name, pid and a random number
  std::string secret;                             // shared by all peers; required for TCP
  std::string model;                              // fingerprint: peers with another one are refused
  std::vector<std::string> routes;                // those that may be used; empty: those by default
  std::int64_t lease_ns = 3'000'000'000;          // a peer that says nothing for so long is lost
  std::int64_t reserve_max_ns = 600'000'000'000;  // a reservation lives at most so long
  int worker_threads = 2;
  std::uint32_t transfers_max = 4096;     // of one peer, under way
  std::uint32_t reserved_max = 1U << 20;  // blocks of one peer, reserved and lent together
  std::uint32_t received_max = 65536;     // items that wait for the application; then peers get kBusy
  bool trusted_network = false;           // frames on TCP carry a checksum, not a MAC, if the peer says so as well
  bool unix_door = true;                  // peers on this host that meet by TCP go on over a Unix socket
  bool measure_routes = true;             // when peers meet, where it is a question: see transfer/route_probe.h
  std::int64_t measure_ns = 50'000'000;   // no write of a measurement begins later
  bool joins_cluster = false;             // nobody is met before join(), which brings the instance id
  TransportSettings transports;
};

struct PeerInfo {
  std::string name;
  std::uint32_t instance = 0;
  std::uint64_t epoch = 0;
  std::string link;                 // "unix", "tcp 127.0.0.1:4711"
  std::vector<std::string> routes;  // the cheapest first
  std::uint64_t pid = 0;
  std::uint32_t lent_blocks = 0;             // of ours, to it
  std::uint32_t borrowed_blocks = 0;         // of its, by us
  std::uint32_t reserved_blocks = 0;         // of ours, for transfers of it that are under way
  std::uint32_t transfers = 0;               // from here, and requests to it, that are under way
  std::vector<RouteFailure> route_failures;  // of routes to it that have failed, and not worked since
  std::vector<RoutePrice> route_prices;      // what they are taken to cost
};

// Blocks that a peer sent and wants the application to know of.
struct Received {
  std::string peer;
  std::vector<Address> addresses;  // active, the application's now; inserted: cached and pinned; lent: the peer's
  bool inserted = false;
  bool lent = false;
  std::string name_space;
  std::vector<Token> tokens;  // of an insertion
  Bytes private_bytes;
  Pins pins;
  IndexPin pin;  // while it waits in the queue, which must not keep the pool alive
};

class Service {
 public:
  static std::unique_ptr<Service> make(Pool& pool, const ServiceOptions& options, const MakeRanks& make_ranks);
  virtual ~Service() = default;

  // "unix:/path", "unix:@abstract", "tcp:HOST:PORT" (port 0: any). Returns the address to connect to.
  virtual std::string listen(const std::string& address) = 0;
  // Returns the peer's name, also when it is a peer already, or calls at the same time. As long as nobody listens there
  // it tries again, unless told not to. Then the routes to it are measured, where that is a question. Throws kAuth,
  // kPeerLost (nobody listens), kProtocol, kLayoutMismatch, kDeadline, kCancelled.
  virtual std::string connect(const std::string& address, const Waiting& waiting, bool wait_for_listener = true) = 0;
  virtual void disconnect(const std::string& peer, const GivenUp& given_up = {}) = 0;
  virtual std::vector<PeerInfo> peers() = 0;
  virtual const ServiceOptions& options() const noexcept = 0;
  // What was asked for and cannot be had here in full, for a log: a route that leaves out a medium, say. Each says why.
  virtual const std::vector<std::string>& notes() const noexcept = 0;

  virtual std::vector<Address> alloc(const std::string& peer, std::size_t n, MediumChoice medium, bool may_evict,
                                     const Waiting& waiting) = 0;
  // The lent blocks among these, of any number of peers; others are left alone. When one of them is wrong, or
  // `free_own` throws, which frees the others, nothing has happened. From then on nobody keeps the others' from being
  // freed: what a peer answers is thrown when all have been asked. Blocks of a peer that could not be asked (kBusy)
  // stay lent.
  virtual void free(const Address* addresses, std::size_t n, const Waiting& waiting,
                    const std::function<void()>& free_own = {}) = 0;

  // Asks a peer for these blocks back, which are lent to it, or for any `count` of them, and takes at the deadline what
  // has not come. Throws kPeerLost, kNotOwner, kArgument, kBusy, kCancelled: see Session::recall().
  virtual RecallResult recall(const std::string& peer, std::vector<Address> addresses, const Waiting& waiting) = 0;
  virtual RecallResult recall(const std::string& peer, std::size_t count, const Waiting& waiting) = 0;

  // In a cluster, a verb that names a member meets it first, if it is not connected: that takes at most until the
  // verb's deadline, or until `given_up`, and throws kPeerLost with what was tried. Every call tries again.
  virtual std::shared_ptr<Transfer> transfer(TransferRequest&& request, const GivenUp& given_up = {}) = 0;
  // A wrong argument throws, and none is started; what fails later, fails in its handle.
  virtual std::vector<std::shared_ptr<Transfer>> transfer_batch(std::vector<TransferRequest>&& requests,
                                                                const GivenUp& given_up = {}) = 0;
  // Reads blocks of a peer into active blocks of this pool: addresses() of the handle are `to`. When `to` is empty,
  // they are allocated as by alloc(), and freed again should the fetch fail. When `peer` is empty, it is whose blocks
  // the addresses are.
  virtual std::shared_ptr<Transfer> fetch(FetchRequest&& request, const GivenUp& given_up = {}) = 0;

  // The next item, or null at `until_ns`. Throws kClosed, and what the pool has failed with, once none is left.
  virtual std::unique_ptr<Received> receive(std::int64_t until_ns) = 0;
  virtual int received_fd() = 0;  // readable while items wait

  // Peers that come and go, and recalls: kept from begin to end, beginning with one event for each peer that is here.
  // The descriptor is readable while some wait. next_peer_event() never waits, and throws kClosed once the pool is
  // closed and none is left.
  virtual int begin_peer_events() = 0;
  virtual std::optional<PeerEvent> next_peer_event() = 0;
  virtual void end_peer_events() noexcept = 0;

  // --- of a member of a cluster ---
  // Of a service that joins_cluster: its instance id, as the directory has given it. From now on peers are met.
  virtual void join(std::uint32_t instance) = 0;
  // Who there is, without this pool: the whole picture, as often as it changes. Sessions with an incarnation that
  // another has followed under its name end with kPeerLost.
  virtual void set_members(std::vector<ClusterMember> members) = 0;
  // As the verbs do it: returns when the member is connected.
  virtual void meet_member(const std::string& peer, const Waiting& waiting) = 0;
  // The directory has told that this incarnation is dead: its session ends with kPeerLost, and it is let in no more
  // until it is in the picture again. Idempotent.
  virtual void expel(std::uint64_t epoch, const std::string& why) = 0;
  // This pool has lost its own lease: its sessions end, what needs peers throws kFenced with this text, and nobody is
  // let in, until unfence(). Waits shortly for writes that are under way. Both idempotent.
  virtual void fence(const std::string& why) = 0;
  virtual void unfence() = 0;
  // What a peer said that has dropped this incarnation, and refused it since; "" when none has. Forgotten by fence()
  // and unfence().
  virtual std::string dropped_by() const = 0;

  // --- of a logical instance; throw kState of another ---
  virtual std::vector<RankInfo> ranks() = 0;
  // Until all ranks have joined; false at the deadline. Throws kPeerLost when one is lost.
  virtual bool wait_for_ranks(std::int64_t deadline_ns) = 0;
  // Of this incarnation: what a rank asks for when it joins.
  virtual std::uint64_t epoch() const noexcept = 0;

  // The transfers that were begun here, as far as they have ended; also once it is closed.
  virtual TransferTally::Counts transfer_counts(TransferKind kind) const noexcept = 0;

  // The pool has failed: who waits for what peers send hears it.
  virtual void fail(const Error& why) = 0;
  // Ends everything: transfers fail with kClosed, peers are told, threads joined. Idempotent.
  virtual void close() noexcept = 0;
};

}  // namespace kvpool
