// A rank of a logical instance, in a process separate from its scheduler. It has the memory for its shard of every
// block, and channels to the ranks of peers. It follows its scheduler's orders, and has no index, no allocator and no
// block states.
//
// When the scheduler is gone, the rank departs from all meetings, which proves to peers that it writes no more. It
// cannot be used again after that.
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
#include "kvpool/peers/service_options.h"

namespace kvpool {

struct RankOptions {
  // A rank uses only secret, model, routes, lease_ns, worker_threads, trusted_network, prefer_unix_socket, ucx, nccl
  // and its limits.
  ServiceOptions service;
  std::string scheduler;                // its address
  std::uint64_t scheduler_incarnation;  // of the instance that the rank is to join
  std::uint32_t instance = 0;           // of its addresses
  std::uint32_t rank = 0;
  std::string listen;  // where ranks of peers connect to, besides a Unix socket on this host; "": that socket only
};

class RankNode {
 public:
  // Joins the scheduler. Throws what Endpoint::listen and connect throw, the scheduler's refusal (RankHub::admit), and
  // kPeerLost when another instance answers at that address.
  static std::unique_ptr<RankNode> join(const RankOptions& options, LocalMemory memory, const Waiting& waiting);
  virtual ~RankNode() = default;

  virtual std::string address() const = 0;
  // Why the rank was lost or closed; nothing while it serves.
  virtual std::optional<Error> lost() const = 0;
  // Waits until the rank is lost or closed; false at the deadline.
  virtual bool wait_lost(std::int64_t deadline_ns) = 0;
  // Closes the rank; its scheduler loses the whole instance. Waits at most 2 s for peers to end their writes here.
  // Idempotent.
  virtual void close() noexcept = 0;
};

}  // namespace kvpool
