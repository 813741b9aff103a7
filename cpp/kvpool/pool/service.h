// The half of a pool that speaks with its peers.
//
// One C++ thread (the reactor) answers peers and keeps leases; it never needs Python's GIL. Worker threads write what
// is large. Thread-safety: everything here may be called by several threads; everything that waits has a deadline.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kvpool/base/address.h"
#include "kvpool/index/pins.h"
#include "kvpool/transfer/handle.h"
#include "kvpool/transfer/request.h"

namespace kvpool {

class Pool;

struct ServiceOptions {
  std::string name;                          // "": host name, pid and a random number
  std::string secret;                        // shared by all peers; required for TCP
  std::string model;                         // fingerprint: peers with another one are refused
  std::vector<std::string> routes;           // those that may be used; empty: all but cma (opt-in)
  std::int64_t lease_ns = 3'000'000'000;     // a peer that says nothing for so long is lost
  std::int64_t reserve_ns = 30'000'000'000;  // a reservation lives at most so long
  int worker_threads = 2;
  std::uint32_t transfers_max = 4096;     // of one peer, under way
  std::uint32_t reserved_max = 1U << 20;  // blocks of one peer, reserved and lent together
  std::uint32_t received_max = 65536;     // items that wait for the application; then peers get kBusy
  bool trusted_network = false;           // frames on TCP carry a checksum instead of a MAC
  bool unix_door = true;                  // peers on this host that connect by TCP are met over a Unix socket
  std::string ucx = "wheel";              // wheel | system | path of libucp; used when a route is "ucx"
};

struct PeerInfo {
  std::string name;
  std::uint32_t instance = 0;
  std::uint64_t epoch = 0;
  std::string link;                 // "unix", "tcp 127.0.0.1:4711"
  std::vector<std::string> routes;  // the cheapest first
  std::uint64_t pid = 0;
  std::uint32_t lent_blocks = 0;      // of ours, to it
  std::uint32_t borrowed_blocks = 0;  // of its, by us
  std::uint32_t reserved_blocks = 0;  // of ours, for transfers of it that are under way
};

// Blocks that a peer sent and wants the application to know of.
struct Received {
  std::string peer;
  std::vector<Address> addresses;  // active: the application's now; inserted: cached and pinned; named: still lent
  bool inserted = false;
  std::string name_space;
  std::vector<Token> tokens;  // of an insertion
  Bytes private_bytes;
  Pins pins;
  IndexPin pin;  // while it waits in the queue, which must not keep the pool alive
};

class Service {
 public:
  static std::unique_ptr<Service> make(Pool& pool, const ServiceOptions& options);
  virtual ~Service() = default;

  // "unix:/path", "unix:@abstract", "tcp:HOST:PORT" (port 0: any). Returns the address to connect to.
  virtual std::string listen(const std::string& address) = 0;
  // Returns the peer's name. Throws kAuth, kPeerLost (nobody listens), kProtocol, kLayoutMismatch, kDeadline.
  virtual std::string connect(const std::string& address, std::int64_t deadline_ns) = 0;
  virtual void disconnect(const std::string& peer) = 0;
  virtual std::vector<PeerInfo> peers() = 0;
  virtual const ServiceOptions& options() const noexcept = 0;

  virtual std::vector<Address> alloc(const std::string& peer, std::size_t n, Medium medium, bool may_evict,
                                     std::int64_t deadline_ns) = 0;
  // The lent blocks among these, of any number of peers; others are left alone. All or nothing a peer.
  virtual void free(const Address* addresses, std::size_t n, std::int64_t deadline_ns) = 0;

  virtual std::shared_ptr<Transfer> transfer(TransferRequest&& request) = 0;
  // A wrong argument throws, and none is started; what fails later, fails in its handle.
  virtual std::vector<std::shared_ptr<Transfer>> transfer_batch(std::vector<TransferRequest>&& requests) = 0;
  // Reads blocks of a peer into active blocks of this pool: addresses() of the handle are `to`. When `to` is empty,
  // they are allocated as by alloc(), and freed again should the fetch fail.
  virtual std::shared_ptr<Transfer> fetch(FetchRequest&& request) = 0;

  // The next item, or null at `until_ns`. Throws kClosed.
  virtual std::unique_ptr<Received> receive(std::int64_t until_ns) = 0;
  virtual int received_fd() = 0;  // readable while items wait

  // Ends everything: transfers fail with kClosed, peers are told, threads joined. Idempotent.
  virtual void close() noexcept = 0;
};

}  // namespace kvpool
