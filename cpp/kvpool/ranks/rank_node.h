// A rank of a logical instance in a process of its own: the memory of its part of every block, and the channels by
// which it goes to ranks of peers. It does what its scheduler says, and has no index, no allocator and no states.
//
// When the scheduler is gone the rank departs from all meetings, as the proof that peers need, and is of no more use.
//
// Thread-safety: all of it. No call needs Python's GIL.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "kvpool/base/error.h"
#include "kvpool/base/wait.h"
#include "kvpool/peers/route_maker.h"
#include "kvpool/peers/service.h"

namespace kvpool {

struct RankOptions {
  // Of these secret, model, routes, lease_ns, worker_threads, trusted_network, unix_door, ucx, nccl and its limits
  // count.
  ServiceOptions service;
  std::string scheduler;          // its address
  std::uint64_t scheduler_epoch;  // of the instance that was meant
  std::uint32_t instance = 0;     // of its addresses
  std::uint32_t rank = 0;
  std::string listen;  // where ranks of peers connect to, besides a Unix socket on this host; "": only there
};

class RankNode {
 public:
  // Joins. Throws what Endpoint::listen and connect throw, what the scheduler refuses it with (RankHub::admit), and
  // kPeerLost when another instance answers there.
  static std::unique_ptr<RankNode> join(const RankOptions& options, LocalMemory memory, const Waiting& waiting);
  virtual ~RankNode() = default;

  virtual std::string address() const = 0;
  // Why the rank is of no more use; nothing as long as it is.
  virtual std::optional<Error> lost() const = 0;
  // Until the rank is lost or closed; false at the deadline.
  virtual bool wait_lost(std::int64_t deadline_ns) = 0;
  // Ends it: the scheduler loses its instance. Waits at most 2 s for peers to end what they write here. Idempotent.
  virtual void close() noexcept = 0;
};

}  // namespace kvpool
