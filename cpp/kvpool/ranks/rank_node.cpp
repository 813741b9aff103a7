#include "kvpool/ranks/rank_node.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <unordered_map>
#include <utility>

#include "kvpool/base/clock.h"
#include "kvpool/base/failure.h"
#include "kvpool/base/fork_guard.h"
#include "kvpool/cuda/order.h"
#include "kvpool/exec/executor.h"
#include "kvpool/net/connect/endpoint.h"
#include "kvpool/net/reactor.h"
#include "kvpool/peers/incarnation.h"
#include "kvpool/peers/late_writers.h"
#include "kvpool/ranks/rank_channels.h"
#include "kvpool/ranks/rank_tiers.h"
#include "kvpool/routes/route_error.h"
#include "kvpool/transfer/failure.h"
#include "kvpool/transfer/messages.h"

namespace kvpool {
namespace {

constexpr std::int64_t kMillisecond = 1'000'000;
constexpr std::int64_t kLifetimeMax = std::int64_t{3'600'000} * kMillisecond;
constexpr std::chrono::seconds kPartingTime{2};

std::string hexadecimal(std::uint64_t number) {
  char text[17];
  snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(number));
  return text;
}

std::int64_t deadline_of(std::uint64_t lifetime_ms) noexcept {
  constexpr std::uint64_t kMost = kLifetimeMax / kMillisecond;
  return monotonic_ns() + static_cast<std::int64_t>(std::min(lifetime_ms, kMost)) * kMillisecond;
}

std::shared_ptr<const DeviceOrder> make_order(const LocalMemory& memory) {
  auto gpu = memory.gpu();
  return gpu == nullptr ? nullptr : DeviceOrder::after(std::move(gpu), std::nullopt);
}

class RankNodeImpl final : public RankNode {
 public:
  RankNodeImpl(const RankOptions& options, LocalMemory memory)
      : options_(options),
        incarnation_(random_incarnation()),
        executor_([this](const Error& why) { lose(why); }),
        tiers_(std::make_unique<RankTiers>(memory, executor_, options_.service.worker_threads)),
        order_(make_order(memory)),
        routes_(options_.service, std::move(memory), incarnation_, executor_,
                [this](const void* key, std::function<void()> work) {
                  receives_.run(key, Priority::kDecode, std::move(work));
                }),
        copies_(executor_, {options_.service.worker_threads, options_.service.worker_threads}),
        waits_(executor_),
        watches_(executor_, WriterQuarantine::kWatchLimits),
        receives_(executor_),
        reactor_(std::make_unique<Reactor>("kvpool-rank")),
        writer_quarantine_(*reactor_, watches_),
        channels_(routes_, waits_, watches_, writer_quarantine_) {
    EndpointOptions endpoint;
    endpoint.secret = options_.service.secret;
    endpoint.trusted_network = options_.service.trusted_network;
    endpoint.lease_ns = options_.service.lease_ns;
    endpoint.prefer_unix_socket = options_.service.prefer_unix_socket;
    endpoint_ = std::make_unique<Endpoint>(
        *reactor_, endpoint, [this] { return introduce(); },
        [this](const std::shared_ptr<Link>& link, const PeerMetadata& metadata, bool initiated_here) {
          return admit(link, metadata, initiated_here);
        });
    channels_.start(*endpoint_);
    channels_.on_device_lost([this](const Error& why) { lose(why); });
  }
  ~RankNodeImpl() override { close(); }

  void join(const Waiting& waiting) {
    std::string address = endpoint_->listen("unix:@kvpool-rank-" + hexadecimal(incarnation_));
    if (!options_.listen.empty()) address = endpoint_->listen(options_.listen);
    {
      const std::lock_guard lock(mutex_);
      address_ = std::move(address);
    }
    const auto link = endpoint_->connect(options_.scheduler, waiting);
    const std::lock_guard lock(mutex_);
    if (scheduler_ == link) return;
    if (why_lost_) throw Error(*why_lost_);  // it has closed since
    link->close(Error(ErrorCode::kPeerLost, "it was another that was looked for"));
    throw Error(ErrorCode::kPeerLost,
                "the instance that exported this rank is gone; another pool answers at " + options_.scheduler);
  }

  std::string address() const override {
    const std::lock_guard lock(mutex_);
    return address_;
  }
  std::optional<Error> lost() const override {
    const std::lock_guard lock(mutex_);
    return why_lost_;
  }
  bool wait_lost(std::int64_t deadline_ns) override {
    std::unique_lock lock(mutex_);
    while (!why_lost_) {
      const std::int64_t left = deadline_ns - monotonic_ns();
      if (left <= 0) return false;
      changed_.wait_for(lock, std::chrono::nanoseconds(left));
    }
    return true;
  }
  void close() noexcept override;

 private:
  class SchedulerLink;
  using Stop = std::shared_ptr<std::atomic<bool>>;

  Introduction introduce();
  std::shared_ptr<LinkHandler> admit(const std::shared_ptr<Link>& link, const PeerMetadata& metadata,
                                     bool initiated_here);
  void on_message(Message&& message);
  void on_scheduler_closed(const Error& why);
  void lose(const Error& why) noexcept;
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

// What the scheduler says.
class RankNodeImpl::SchedulerLink final : public LinkHandler {
 public:
  explicit SchedulerLink(RankNodeImpl& node) : node_(node) {}
  void on_message(Message&& message) override { node_.on_message(std::move(message)); }
  Placement on_data(std::uint64_t, std::span<const std::byte>, std::uint64_t) override {
    throw Error(ErrorCode::kProtocol, "a scheduler has no content to send");
  }
  void on_placed(std::uint64_t, bool) override {}
  void on_closed(const Error& why) override { node_.on_scheduler_closed(why); }

 private:
  RankNodeImpl& node_;
};

// --- coming and going ---

Introduction RankNodeImpl::introduce() {
  Introduction introduction = routes_.introduce();
  introduction.metadata.name = options_.service.name;
  introduction.metadata.incarnation = incarnation_;
  introduction.metadata.instance = options_.instance;
  introduction.metadata.model = options_.service.model;
  introduction.metadata.rank_of = options_.scheduler_incarnation;
  introduction.metadata.rank = options_.rank;
  introduction.metadata.address = address();
  return introduction;
}

std::shared_ptr<LinkHandler> RankNodeImpl::admit(const std::shared_ptr<Link>& link, const PeerMetadata& metadata,
                                                 bool initiated_here) {
  if (!initiated_here || metadata.meeting != 0) return channels_.admit(link, metadata);
  const std::lock_guard lock(mutex_);
  if (closed_) throw Error(ErrorCode::kClosed, "the rank is closed");
  if (metadata.incarnation != options_.scheduler_incarnation) {
    throw Error(ErrorCode::kPeerLost,
                "the instance that exported this rank is gone; another pool answers at " + options_.scheduler);
  }
  scheduler_ = link;
  return std::make_shared<SchedulerLink>(*this);
}

void RankNodeImpl::on_scheduler_closed(const Error& why) {
  std::shared_ptr<Link> ended;
  const Error lost(ErrorCode::kPeerLost, std::string("the scheduler of this rank is gone: ") + why.what());
  {
    const std::lock_guard lock(mutex_);
    ended.swap(scheduler_);
    if (!why_lost_) why_lost_ = lost;
    for (const auto& [id, stop] : orders_) stop->store(true, std::memory_order_relaxed);
    changed_.notify_all();
  }
  channels_.depart_all(lost, {});
}

// The GPU is gone, and with it this rank's part of every block on it: so is the instance. The end of the link tells the
// scheduler.
void RankNodeImpl::lose(const Error& why) noexcept {
  std::shared_ptr<Link> scheduler;
  {
    const std::lock_guard lock(mutex_);
    scheduler = scheduler_;
    if (!why_lost_) why_lost_ = why;
    changed_.notify_all();
  }
  if (scheduler != nullptr) scheduler->close(why);
}

void RankNodeImpl::close() noexcept {
  std::shared_ptr<Link> scheduler;
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(closed_, true)) return;
    scheduler = scheduler_;
    if (!why_lost_) why_lost_.emplace(ErrorCode::kClosed, "the rank is closed");
    changed_.notify_all();
  }
  endpoint_->close();
  // What it writes itself ends first, and the scheduler hears of its end; then what peers write here.
  struct Parting {
    std::mutex mutex;
    std::condition_variable changed;
    bool clear = false;
  };
  const auto parting = std::make_shared<Parting>();
  channels_.depart_all(Error(ErrorCode::kClosed, "the rank is closed"), [parting] {
    const std::lock_guard lock(parting->mutex);
    parting->clear = true;
    parting->changed.notify_all();
  });
  if (scheduler != nullptr) scheduler->close(Error(ErrorCode::kClosed, "the rank has been closed"));
  {
    std::unique_lock lock(parting->mutex);
    parting->changed.wait_for(lock, kPartingTime, [&] { return parting->clear; });
  }
  channels_.abandon();
  copies_.stop();
  waits_.stop();
  watches_.stop();
  receives_.stop();
  reactor_->stop();  // its last calls end every link, and make writer quarantine of those who have not answered
  tiers_.reset();    // the scheduler's link was one of them: nothing is moved or ordered any more
  order_.reset();
  std::vector<std::pair<std::shared_ptr<DepartingPeer>, std::shared_ptr<Link>>> left;
  writer_quarantine_.clear([&](const std::shared_ptr<DepartingPeer>& party, const std::shared_ptr<Link>& link) {
    left.emplace_back(party, link);
  });
  // Release the memory, unless a peer may still write to it.
  std::vector<LateWriter> late;
  for (const auto& [party, link] : left) add_late_writer(routes_, party, link, late);
  const auto failure = failure_of([&] {
    if (!late.empty()) RetainedMemory::keep(routes_.memory().keepalive(), std::move(late));
  });
  if (!failure) routes_.let_go();  // else it is kept for ever
  executor_.close();
}

// --- what the scheduler asks ---

void RankNodeImpl::on_message(Message&& message) {
  switch (message.kind) {
    case FrameKind::kMeet:
      return on_meet(message.id, read_meet(message.body));
    case FrameKind::kOrder:
      return on_order(message.id, read_order(message.body));
    case FrameKind::kStop:
      return on_stop(message.id);
    case FrameKind::kDepart: {
      const std::uint64_t meeting = read_depart(message.body).meeting;
      const Error why(ErrorCode::kPeerLost, "the meeting with the peer is over");
      return channels_.depart(meeting, why, [this, id = message.id] { answer(FrameKind::kAnswer, id, {}); });
    }
    case FrameKind::kCopy:
      return on_copy(message.id, read_copy(message.body));
    default:
      throw Error(ErrorCode::kProtocol,
                  "a frame of kind " + std::to_string(static_cast<int>(message.kind)) + " is not known to a rank");
  }
}

void RankNodeImpl::answer(FrameKind kind, std::uint64_t id, Bytes body) noexcept {
  std::shared_ptr<Link> scheduler;
  {
    const std::lock_guard lock(mutex_);
    scheduler = scheduler_;
  }
  if (scheduler == nullptr) return;
  try {
    scheduler->send(Message{kind, 0, id, std::move(body)});
  } catch (const std::exception& failure) {
    scheduler->close(Error(ErrorCode::kPeerLost, failure.what()));
  }
}

void RankNodeImpl::answer(std::uint64_t id, const std::optional<Error>& failure) noexcept {
  try {
    if (failure) return answer(FrameKind::kRefused, id, write_error(for_peer(*failure)));
    answer(FrameKind::kAnswer, id, {});
  } catch (const std::exception&) {
    answer(FrameKind::kRefused, id, {});  // not even memory for the reason: it ends the link
  }
}

void RankNodeImpl::on_meet(std::uint64_t id, MeetBody&& body) {
  const std::int64_t deadline = deadline_of(body.lifetime_ms);
  const auto kept = std::make_shared<const MeetBody>(std::move(body));
  // It may wait for a peer: not where blocks are copied.
  waits_.run(kept.get(), Priority::kDecode,
             [this, id, deadline, kept] { answer(id, failure_of([&] { channels_.meet(*kept, deadline); })); });
}

void RankNodeImpl::on_order(std::uint64_t id, OrderBody&& body) {
  const auto kept = std::make_shared<const OrderBody>(std::move(body));
  ChannelOrder order;
  order.meeting = kept->meeting;
  order.channels = kept->channels;
  order.request.transfer = id;
  order.request.from = kept->from;
  order.request.to = kept->to;
  order.request.merge = kept->merge;
  order.request.deadline_ns = deadline_of(kept->lifetime_ms);
  order.keep = kept;
  // The scheduler has no stream of this process to name. Its word comes after the engine's: what fills these blocks has
  // been given to the GPU by now.
  order.after = order_;
  order.stop = std::make_shared<std::atomic<bool>>(false);
  order.report = [this, id](const WriteOutcome& outcome, const Error* error) {
    {
      const std::lock_guard lock(mutex_);
      orders_.erase(id);
    }
    if (error != nullptr && error->code() == ErrorCode::kDeviceLost) return lose(*error);
    if (error != nullptr) return answer(id, route_error(*error));
    answer(FrameKind::kAnswer, id, write_body(ReportBody{outcome.calls, outcome.bytes}));
  };
  {
    const std::lock_guard lock(mutex_);
    if (!orders_.emplace(id, order.stop).second) throw Error(ErrorCode::kProtocol, "an order's id is used twice");
  }
  channels_.write(std::move(order));
}

void RankNodeImpl::on_stop(std::uint64_t id) {
  const std::lock_guard lock(mutex_);
  const auto entry = orders_.find(id);
  if (entry != orders_.end()) entry->second->store(true, std::memory_order_relaxed);
}

void RankNodeImpl::on_copy(std::uint64_t id, CopyBody&& body) {
  copies_.run(Priority::kDecode, [this, id, body = std::move(body)] {
    const auto failure = failure_of([&] { tiers_->copy(routes_.memory(), body); });
    if (failure && failure->code() == ErrorCode::kDeviceLost) return lose(*failure);
    answer(id, failure);
  });
}

// What the process that joined holds. In a forked child the node is left as it is: its threads are not there, and its
// locks may be held for ever.
class OwnNode final : public RankNode {
 public:
  explicit OwnNode(std::unique_ptr<RankNodeImpl> node) : node_(std::move(node)) {}
  ~OwnNode() override {
    if (forked()) static_cast<void>(node_.release());
  }

  std::string address() const override {
    if (forked()) throw not_here();
    return node_->address();
  }
  std::optional<Error> lost() const override { return forked() ? not_here() : node_->lost(); }
  bool wait_lost(std::int64_t deadline_ns) override {
    if (forked()) throw not_here();
    return node_->wait_lost(deadline_ns);
  }
  void close() noexcept override {
    if (!forked()) node_->close();
  }

 private:
  bool forked() const noexcept { return fork_generation() != born_; }
  static Error not_here() { return {ErrorCode::kFork, "this rank belongs to the parent process"}; }

  std::unique_ptr<RankNodeImpl> node_;
  const std::uint32_t born_ = fork_generation();
};

}  // namespace

std::unique_ptr<RankNode> RankNode::join(const RankOptions& options, LocalMemory memory, const Waiting& waiting) {
  auto node = std::make_unique<RankNodeImpl>(options, std::move(memory));
  node->join(waiting);
  return std::make_unique<OwnNode>(std::move(node));
}

}  // namespace kvpool
