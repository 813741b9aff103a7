#include "kvpool/ranks/rank_hub.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "kvpool/base/clock.h"
#include "kvpool/base/failure.h"
#include "kvpool/net/reactor.h"
#include "kvpool/ranks/joined_rank.h"
#include "kvpool/ranks/rank_poll.h"
#include "kvpool/transfer/messages.h"
#include "kvpool/transfer/same_blocks.h"

namespace kvpool {
namespace {

constexpr std::int64_t kRetryAfterUs = 100'000;
constexpr std::int64_t kMillisecond = 1'000'000;

std::uint64_t lifetime_ms(std::int64_t deadline_ns) noexcept {
  return static_cast<std::uint64_t>(std::max<std::int64_t>(1, (deadline_ns - monotonic_ns()) / kMillisecond));
}

bool holds_something(const RankSlice& slice) noexcept { return slice.layers > 0 && slice.heads > 0; }

// One rank of another process: what is to be written is sent to it as an order.
class RemoteRank final : public RankWriter {
 public:
  RemoteRank(std::shared_ptr<JoinedRank> rank, std::uint64_t meeting) : rank_(std::move(rank)), meeting_(meeting) {}

  void write(const RankOrder& order, const WriteRequest& request, Report report) override {
    OrderBody body;
    body.meeting = meeting_;
    body.merge = request.merge;
    body.lifetime_ms = lifetime_ms(request.deadline_ns);
    body.channels = order.channels;
    body.from.assign(request.from.begin(), request.from.end());
    body.to.assign(request.to.begin(), request.to.end());
    const std::uint64_t key = orders_->begin(request.transfer);
    try {
      const std::uint64_t id =
          rank_->ask(FrameKind::kOrder, write_body(body),
                     [orders = orders_, key, report = std::move(report)](const Message* answer, const Error* why) {
                       orders->end(key);
                       if (why != nullptr) return report({}, why);
                       take(*answer, report);
                     });
      if (orders_->sent(key, id)) rank_->tell(FrameKind::kStop, id);
    } catch (...) {
      orders_->end(key);
      throw;
    }
  }

  void stop(std::uint64_t transfer) noexcept override {
    for (const std::uint64_t id : orders_->stop(transfer)) rank_->tell(FrameKind::kStop, id);
  }

  // What is under way ends; orders that come later find their channels departed.
  void close() noexcept override {
    for (const std::uint64_t id : orders_->stop(std::nullopt)) rank_->tell(FrameKind::kStop, id);
  }

 private:
  // Those that have not been answered.
  class Orders {
   public:
    std::uint64_t begin(std::uint64_t transfer) {
      const std::lock_guard lock(mutex_);
      open_.emplace(++last_, Order{transfer, 0, false});
      return last_;
    }
    // Whether it was asked to stop meanwhile.
    bool sent(std::uint64_t key, std::uint64_t id) {
      const std::lock_guard lock(mutex_);
      const auto entry = open_.find(key);
      if (entry == open_.end()) return false;
      entry->second.id = id;
      return entry->second.stopped;
    }
    void end(std::uint64_t key) {
      const std::lock_guard lock(mutex_);
      open_.erase(key);
    }
    // Those to tell to stop, of one transfer or of all.
    std::vector<std::uint64_t> stop(std::optional<std::uint64_t> transfer) {
      std::vector<std::uint64_t> ids;
      const std::lock_guard lock(mutex_);
      for (auto& [key, order] : open_) {
        if (transfer && order.transfer != *transfer) continue;
        order.stopped = true;
        if (order.id != 0) ids.push_back(order.id);
      }
      return ids;
    }

   private:
    struct Order {
      std::uint64_t transfer;
      std::uint64_t id;  // of the request to the rank; 0 until it is sent
      bool stopped;
    };
    mutable std::mutex mutex_;
    std::uint64_t last_ = 0;
    std::map<std::uint64_t, Order> open_;
  };

  // What cannot be read ends the order, and then the link.
  static void take(const Message& answer, const Report& report) {
    WriteOutcome outcome;
    std::optional<Error> why;
    const auto unread = failure_of([&] {
      if (answer.kind == FrameKind::kRefused) {
        why = read_error(answer.body);
        return;
      }
      const ReportBody body = read_report(answer.body);
      outcome = {body.calls, body.bytes};
    });
    if (unread)
      why.emplace(ErrorCode::kPeerLost, std::string("the answer of a rank cannot be read: ") + unread->what());
    report(outcome, why ? &*why : nullptr);
    if (unread) throw Error(*unread);
  }

  const std::shared_ptr<JoinedRank> rank_;
  const std::uint64_t meeting_;
  const std::shared_ptr<Orders> orders_ = std::make_shared<Orders>();
};

}  // namespace

RankHub::RankHub(const Sharding& sharding, MediumMap<std::uint32_t> blocks,
                 std::function<void(const Error& why)> on_lost)
    : sharding_(sharding), blocks_(blocks), on_lost_(std::move(on_lost)) {
  for (std::uint32_t rank = 0; rank < sharding_.ranks(); ++rank) {
    if (holds_something(sharding_.slice(rank))) ++needed_;
  }
}

RankHub::~RankHub() { close(); }

// --- which ranks have joined ---

void RankHub::introduce(PeerMetadata& metadata) const {
  metadata.tp = sharding_.tp();
  for (std::uint32_t stage = 0; stage < sharding_.pp(); ++stage) {
    metadata.stage_layers.push_back(sharding_.layer_end(stage) - sharding_.layer_begin(stage));
  }
  const std::lock_guard lock(mutex_);
  for (const auto& [number, rank] : joined_)
    metadata.ranks.push_back({number, rank->metadata().incarnation, rank->metadata().address});
}

void RankHub::check_fits(const PeerMetadata& metadata) const {
  if (metadata.rank >= sharding_.ranks() || !holds_something(sharding_.slice(metadata.rank))) {
    throw Error(ErrorCode::kArgument,
                "this instance has no rank " + std::to_string(metadata.rank) + " that holds a part of its blocks",
                {{"value", metadata.rank}, {"maximum", sharding_.ranks() - 1}});
  }
  const std::string number = std::to_string(metadata.rank);
  check_same_blocks(metadata, "rank " + number, sharding_.rank_layout(metadata.rank, /*aggregated=*/true),
                    "its part of this instance's blocks");
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    if (metadata.media[i].blocks == blocks_[i]) continue;
    throw Error(ErrorCode::kLayoutMismatch,
                "rank " + number + " has " + std::to_string(metadata.media[i].blocks) + " " + medium_name(kMedia[i]) +
                    " blocks, and its instance " + std::to_string(blocks_[i]),
                {{"blocks", metadata.media[i].blocks}, {"blocks_needed", blocks_[i]}});
  }
}

std::shared_ptr<LinkHandler> RankHub::admit(const std::shared_ptr<Link>& link, const PeerMetadata& metadata) {
  check_fits(metadata);
  const std::uint32_t number = metadata.rank;
  const auto rank =
      std::make_shared<JoinedRank>(metadata, link, [this, number](const Error& why) { on_rank_closed(number, why); });
  const std::lock_guard lock(mutex_);
  if (closed_) throw Error(ErrorCode::kClosed, "the pool is closed");
  if (why_lost_) throw Error(ErrorCode::kState, why_lost_->what());
  if (!joined_.emplace(number, rank).second) {
    throw Error(ErrorCode::kState, "rank " + std::to_string(number) + " has joined already");
  }
  changed_.notify_all();
  return rank;
}

void RankHub::on_rank_closed(std::optional<std::uint32_t> rank, const Error& why) {
  {
    const std::lock_guard lock(mutex_);
    if (closed_ || why_lost_) return;
    if (rank && !joined_.contains(*rank)) return;  // it was refused
    why_lost_ = why;
    changed_.notify_all();
  }
  on_lost_(why);
}

std::vector<std::shared_ptr<JoinedRank>> RankHub::joined() const {
  std::vector<std::shared_ptr<JoinedRank>> ranks;
  const std::lock_guard lock(mutex_);
  ranks.reserve(joined_.size());
  for (const auto& [number, rank] : joined_) ranks.push_back(rank);
  return ranks;
}

std::vector<RankInfo> RankHub::ranks() const {
  std::vector<RankInfo> list;
  const std::lock_guard lock(mutex_);
  for (std::uint32_t number = 0; number < sharding_.ranks(); ++number) {
    if (!holds_something(sharding_.slice(number))) continue;
    RankInfo info;
    info.rank = number;
    const auto entry = joined_.find(number);
    if (entry != joined_.end()) {
      const PeerMetadata& metadata = entry->second->metadata();
      info = {number, true, metadata.pid, metadata.host, entry->second->describe(), metadata.address};
    }
    list.push_back(std::move(info));
  }
  return list;
}

bool RankHub::wait_for_ranks(std::int64_t deadline_ns) {
  std::unique_lock lock(mutex_);
  while (joined_.size() < needed_ && !why_lost_ && !closed_) {
    const std::int64_t left = deadline_ns - monotonic_ns();
    if (left <= 0) return false;
    changed_.wait_for(lock, std::chrono::nanoseconds(left));
  }
  if (closed_) throw Error(ErrorCode::kClosed, "the pool is closed");
  if (why_lost_) throw Error(*why_lost_);
  return true;
}

void RankHub::check_complete() const {
  const std::lock_guard lock(mutex_);
  if (why_lost_) throw Error(*why_lost_);
  if (joined_.size() == needed_) return;
  throw Error(ErrorCode::kBusy,
              std::to_string(joined_.size()) + " of " + std::to_string(needed_) +
                  " ranks of this instance have joined: connecting to peers and copying blocks need all of them",
              {{"retry_after_us", kRetryAfterUs}});
}

// --- what they are told ---

std::vector<std::unique_ptr<RankWriter>> RankHub::writers(std::uint64_t meeting) {
  std::vector<std::unique_ptr<RankWriter>> writers(sharding_.ranks());
  const std::lock_guard lock(mutex_);
  for (const auto& [number, rank] : joined_) writers[number] = std::make_unique<RemoteRank>(rank, meeting);
  return writers;
}

void RankHub::meet(const GroupMeeting& meeting, const Waiting& waiting) {
  const auto ranks = joined();
  const auto poll = std::make_shared<RankPoll>(ranks.size());
  for (const auto& rank : ranks) {
    const MeetBody body{meeting.meeting, meeting.peer, lifetime_ms(waiting.until_ns),
                        meeting.partners(rank->metadata().rank)};
    rank->ask(FrameKind::kMeet, write_body(body),
              [poll](const Message* answer, const Error* why) { poll->take(answer, why); });
  }
  std::unique_lock lock(poll->mutex);
  while (poll->missing > 0 && !poll->failed) {
    const std::int64_t now = monotonic_ns();
    if (now >= waiting.until_ns) {
      throw Error(ErrorCode::kDeadline,
                  "the ranks of this instance did not reach those of " + meeting.peer + " in time");
    }
    poll->changed.wait_for(lock, std::chrono::nanoseconds(waiting.slice_ns(now) - now));
    lock.unlock();
    waiting.check();
    lock.lock();
  }
  poll->rethrow_if_failed();
}

void RankHub::depart(std::uint64_t meeting, const Error& /*why*/, std::function<void()> clear) {
  const auto ranks = joined();
  // The last answer calls `clear`. A lost rank has no memory left that a peer could write to.
  struct Clear {
    explicit Clear(std::function<void()> call) : call(std::move(call)) {}
    ~Clear() {
      if (call) call();
    }
    Clear(const Clear&) = delete;
    Clear& operator=(const Clear&) = delete;
    std::function<void()> call;
  };
  const auto last = std::make_shared<Clear>(std::move(clear));
  for (const auto& rank : ranks) {
    try {
      rank->ask(FrameKind::kDepart, write_body(DepartBody{meeting}), [last](const Message*, const Error*) {});
    } catch (const std::exception& failure) {
      // It is lost, or takes nothing: then it has to be, for it has not heard that its peers' writes are to be awaited.
      rank->close(Error(ErrorCode::kPeerLost, failure.what()));
    }
  }
}

void RankHub::move(const Address* from, const Address* to, std::size_t n) {
  check_complete();  // a rank that joins later would lack what the others have copied
  try {
    for (std::size_t done = 0; done < n;) {
      const std::size_t part = std::min(n - done, kAddressesMax);  // what one message takes
      move_part({{from + done, from + done + part}, {to + done, to + done + part}});
      done += part;
    }
  } catch (const Error& error) {
    // A rank that merely could not do it has its blocks as they were, and so has the instance.
    if (error.code() == ErrorCode::kPeerLost || error.code() == ErrorCode::kDeviceLost) {
      on_rank_closed(std::nullopt,
                     Error(ErrorCode::kPeerLost, std::string("blocks could not be moved: ") + error.what()));
    }
    throw;
  }
}

// Throws what the first rank that could not do it says.
void RankHub::move_part(const CopyBody& body) {
  const auto ranks = joined();
  const auto poll = std::make_shared<RankPoll>(0);
  {
    // A rank that was asked writes these blocks until it has answered, whatever else fails: the caller gives them back.
    struct Settled {
      RankPoll& poll;
      ~Settled() {
        std::unique_lock lock(poll.mutex);
        poll.changed.wait(lock, [&] { return poll.missing == 0; });
      }
    } const settled{*poll};
    for (const auto& rank : ranks) {
      poll->expect();
      try {
        rank->ask(FrameKind::kCopy, write_body(body),
                  [poll](const Message* answer, const Error* why) { poll->take(answer, why); });
      } catch (...) {
        poll->take(nullptr);  // it was not asked
        throw;
      }
    }
  }
  poll->rethrow_if_failed();
}

void RankHub::close() noexcept {
  std::vector<std::shared_ptr<JoinedRank>> ranks;
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(closed_, true)) return;
    ranks.reserve(joined_.size());
    for (const auto& [number, rank] : joined_) ranks.push_back(rank);
    changed_.notify_all();
  }
  for (const auto& rank : ranks) rank->close(Error(ErrorCode::kPeerLost, "the scheduler of this instance has closed"));
}

}  // namespace kvpool
