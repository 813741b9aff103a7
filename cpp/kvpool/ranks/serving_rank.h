// A rank at work: its memory, its channels to the ranks of peers, and the link to its scheduler. RankNode::join()
// makes it.
//
// Thread-safety: as RankNode.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

#include "kvpool/cuda/order.h"
#include "kvpool/exec/executor.h"
#include "kvpool/net/connect/endpoint.h"
#include "kvpool/net/reactor.h"
#include "kvpool/ranks/rank_channels.h"
#include "kvpool/ranks/rank_node.h"
#include "kvpool/ranks/rank_tiers.h"
#include "kvpool/transfer/messages.h"

namespace kvpool {

class ServingRank final : public RankNode {
 public:
  ServingRank(const RankOptions& options, LocalMemory memory);
  ~ServingRank() override { close(); }

  // Throws as RankNode::join().
  void join(const Waiting& waiting);

  std::string address() const override;
  std::optional<Error> lost() const override;
  bool wait_lost(std::int64_t deadline_ns) override;
  void close() noexcept override;

 private:
  class SchedulerLink;
  using Stop = std::shared_ptr<std::atomic<bool>>;

  // --- coming and going: serving_rank.cpp
  Introduction introduce();
  std::shared_ptr<LinkHandler> admit(const std::shared_ptr<Link>& link, const PeerMetadata& metadata,
                                     bool initiated_here);
  void on_scheduler_closed(const Error& why);
  void lose(const Error& why) noexcept;
  // --- what the scheduler asks: serving_rank_orders.cpp
  void on_message(Message&& message);
  void on_meet(std::uint64_t id, MeetBody&& body);
  void on_order(std::uint64_t id, OrderBody&& body);
  void on_stop(std::uint64_t id);
  void on_copy(std::uint64_t id, CopyBody&& body);
  void answer(FrameKind kind, std::uint64_t id, Bytes body) noexcept;
  void answer(std::uint64_t id, const std::optional<Error>& failure) noexcept;

  const RankOptions options_;
  const std::uint64_t incarnation_;
  Executor executor_;
  // Both until it is closed: they keep the GPU's context.
  std::unique_ptr<RankTiers> tiers_;
  std::shared_ptr<const DeviceOrder> order_;  // after all that the GPU has been given; null without one
  RouteMaker routes_;
  TaskClass copies_;  // between the tiers of this rank
  SerialExecutor waits_;
  SerialExecutor watches_;   // proofs and deadlines that what waits may not delay
  SerialExecutor receives_;  // what waits in the one may wait for what goes on in the other, at a peer
  std::unique_ptr<Reactor> reactor_;
  WriterQuarantine writer_quarantine_;
  RankChannels channels_;
  std::unique_ptr<Endpoint> endpoint_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::string address_;
  std::shared_ptr<Link> scheduler_;  // until it has ended
  std::optional<Error> why_lost_;
  bool closed_ = false;
  std::unordered_map<std::uint64_t, Stop> orders_;
};

}  // namespace kvpool
