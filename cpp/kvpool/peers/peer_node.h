// A pool and what speaks with its peers: a node holds one pool, and at most one service at a time.
//
// When the pool is closed, the service is closed first: peers write to the pool's memory, and its threads call the
// pool. A pool that outlives its node, because a handle keeps it, goes on without peers.
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
#include <vector>

#include "kvpool/base/address.h"
#include "kvpool/base/error.h"
#include "kvpool/base/wait.h"
#include "kvpool/peers/instance_ranks.h"
#include "kvpool/pool/pool_observer.h"

namespace kvpool {

class Pool;
class Service;
struct ServiceOptions;

class PeerNode final : private PoolObserver {
 public:
  static constexpr std::int64_t kTimeoutNs = 30'000'000'000;

  // `make_ranks`: of cpp/kvpool/ranks. `timeout_ns`: how long a verb waits that is called without a timeout.
  PeerNode(std::shared_ptr<Pool> pool, MakeRanks make_ranks, std::int64_t timeout_ns = kTimeoutNs);
  ~PeerNode();
  PeerNode(const PeerNode&) = delete;
  PeerNode& operator=(const PeerNode&) = delete;

  Pool& pool() const noexcept { return *pool_; }
  std::int64_t timeout_ns() const noexcept { return timeout_ns_; }

  // Makes the service, which no verb sees before it is published: the first listen or connect may fail, and then the
  // node is as before. Throws kState when there is one, kClosed when the pool is.
  Service& prepare_service(const ServiceOptions& options);
  void publish_service();
  // Both at once.
  Service& start_service(const ServiceOptions& options);
  // Closes the service; another may be made. Its peers are disconnected, and what they lent is gone.
  // REQUIRES: nobody is in a call of one that was never published.
  void drop_service();
  // The service, published or not; null before prepare_service().
  Service* prepared_service();
  // Null before one is published.
  Service* service() const noexcept { return published_.load(std::memory_order_acquire); }

  // Active blocks of the caller, and blocks that peers have lent: for those it waits, so that the caller must not hold
  // the GIL. Nothing is freed when an address is wrong; when a peer does not take its blocks back, the others are
  // freed.
  void free(const Address* addresses, std::size_t n, const GivenUp& given_up = {});

  // Closes the service, then the pool. Idempotent.
  void close() noexcept;

 private:
  void on_pool_failed(const Error& why) noexcept override;
  void on_pool_closing() noexcept override;

  const std::shared_ptr<Pool> pool_;
  const MakeRanks make_ranks_;
  const std::int64_t timeout_ns_;
  const std::uint32_t made_in_;  // fork generation
  std::mutex mutex_;             // guards what follows, but for reads of published_
  bool closing_ = false;         // the pool is being closed: no service is made any more
  std::unique_ptr<Service> service_;
  std::vector<std::unique_ptr<Service>> dropped_;  // some verb may be in one of them
  std::atomic<Service*> published_{nullptr};
};

}  // namespace kvpool
