// Connects a pool to its peers: a node holds one pool, and at most one service at a time.
//
// Closing the pool closes the service first, because peers write to the pool's memory, and the service's threads call
// the pool. A pool that outlives its node, because a handle keeps it, works on without peers.
//
// After fork every verb throws kFork in the child, and destruction there touches no lock or thread of the parent's.
//
// Thread-safety: all of it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "kvpool/attend_gpu/cubin.h"
#include "kvpool/base/address.h"
#include "kvpool/base/error.h"
#include "kvpool/base/wait.h"
#include "kvpool/peers/instance_ranks.h"
#include "kvpool/pool/pool_observer.h"

namespace kvpool {

class Attender;
class Pool;
class Service;
struct ServiceOptions;

class PeerNode final : private PoolObserver {
 public:
  static constexpr std::int64_t kTimeoutNs = 30'000'000'000;

  // `make_ranks`: of cpp/kvpool/ranks. `timeout_ns`: how long verbs wait when they are called without a timeout.
  // `attend_threads`: that compute attention together. `attend_cubins`: with which a GPU does. Throws as
  // GpuAttention::load.
  PeerNode(std::shared_ptr<Pool> pool, MakeRanks make_ranks, std::int64_t timeout_ns = kTimeoutNs,
           int attend_threads = 1, std::span<const AttentionCubin> attend_cubins = attention_cubins());
  ~PeerNode();
  PeerNode(const PeerNode&) = delete;
  PeerNode& operator=(const PeerNode&) = delete;

  Pool& pool() const noexcept { return *pool_; }
  std::int64_t timeout_ns() const noexcept { return timeout_ns_; }
  // Computes attention over the pool's blocks.
  Attender& attender() const noexcept { return *attender_; }

  // Makes the service. Verbs do not see it before it is published: if the first listen or connect fails, the node is as
  // before. Throws kState when the node has a service, kClosed when the pool is closed.
  Service& prepare_service(const ServiceOptions& options);
  void publish_service();
  // Both at once.
  Service& start_service(const ServiceOptions& options);
  // Closes the service; afterwards another may be made. Its peers are disconnected, and blocks that they lent are lost.
  // REQUIRES: no call of the service is under way if it was never published.
  void drop_service();
  // The service, published or not; null before prepare_service().
  Service* prepared_service();
  // Null before a service is published.
  Service* service() const noexcept { return published_.load(std::memory_order_acquire); }

  // Frees active blocks of the caller, and gives back blocks that peers have lent. It waits for the peers, so the
  // caller must not hold the GIL. Frees nothing when an address is wrong; if a peer does not take its blocks back,
  // frees the other blocks.
  void free(const Address* addresses, std::size_t n, const GivenUp& given_up = {});

  // Closes the service, then the pool. Idempotent.
  void close() noexcept;

 private:
  void on_pool_failed(const Error& why) noexcept override;
  void on_pool_closing() noexcept override;

  const std::shared_ptr<Pool> pool_;
  const std::unique_ptr<Attender> attender_;
  const MakeRanks make_ranks_;
  const std::int64_t timeout_ns_;
  const std::uint32_t made_in_;  // fork generation
  std::mutex mutex_;             // guards the members below, except for reads of published_
  bool closing_ = false;         // the pool is being closed: no further service is made
  std::unique_ptr<Service> service_;
  std::vector<std::unique_ptr<Service>> dropped_;  // verbs may still be using them
  std::atomic<Service*> published_{nullptr};
};

}  // namespace kvpool
