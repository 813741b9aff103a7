// How a rank comes, is lost and goes.
#include "kvpool/ranks/serving_rank.h"

#include <chrono>
#include <cstdio>
#include <utility>
#include <vector>

#include "kvpool/base/clock.h"
#include "kvpool/base/failure.h"
#include "kvpool/peers/incarnation.h"
#include "kvpool/peers/late_writers.h"

namespace kvpool {
namespace {

constexpr std::chrono::seconds kPartingTime{2};

std::string hexadecimal(std::uint64_t number) {
  char text[17];
  snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(number));
  return text;
}

std::shared_ptr<const DeviceOrder> make_order(const LocalMemory& memory) {
  auto gpu = memory.gpu();
  return gpu == nullptr ? nullptr : DeviceOrder::after(std::move(gpu), std::nullopt);
}

}  // namespace

// Hands over what the scheduler says.
class ServingRank::SchedulerLink final : public LinkHandler {
 public:
  explicit SchedulerLink(ServingRank& node) : node_(node) {}
  void on_message(Message&& message) override { node_.on_message(std::move(message)); }
  Placement on_data(std::uint64_t, std::span<const std::byte>, std::uint64_t) override {
    throw Error(ErrorCode::kProtocol, "a scheduler has no content to send");
  }
  void on_placed(std::uint64_t, bool) override {}
  void on_closed(const Error& why) override { node_.on_scheduler_closed(why); }

 private:
  ServingRank& node_;
};

ServingRank::ServingRank(const RankOptions& options, LocalMemory memory)
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

void ServingRank::join(const Waiting& waiting) {
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

std::string ServingRank::address() const {
  const std::lock_guard lock(mutex_);
  return address_;
}

std::optional<Error> ServingRank::lost() const {
  const std::lock_guard lock(mutex_);
  return why_lost_;
}

bool ServingRank::wait_lost(std::int64_t deadline_ns) {
  std::unique_lock lock(mutex_);
  while (!why_lost_) {
    const std::int64_t left = deadline_ns - monotonic_ns();
    if (left <= 0) return false;
    changed_.wait_for(lock, std::chrono::nanoseconds(left));
  }
  return true;
}

Introduction ServingRank::introduce() {
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

std::shared_ptr<LinkHandler> ServingRank::admit(const std::shared_ptr<Link>& link, const PeerMetadata& metadata,
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

void ServingRank::on_scheduler_closed(const Error& why) {
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
void ServingRank::lose(const Error& why) noexcept {
  std::shared_ptr<Link> scheduler;
  {
    const std::lock_guard lock(mutex_);
    scheduler = scheduler_;
    if (!why_lost_) why_lost_ = why;
    changed_.notify_all();
  }
  if (scheduler != nullptr) scheduler->close(why);
}

void ServingRank::close() noexcept {
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

}  // namespace kvpool
