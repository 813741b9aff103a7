#include "kvpool/transfer/group_route.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <string>
#include <utility>

#include "kvpool/base/check.h"
#include "kvpool/base/error.h"

namespace kvpool {
namespace {

// How often a write that waits for other ranks looks whether its caller has cancelled it.
constexpr std::chrono::milliseconds kLookForCancel{5};

class LocalRank final : public RankWriter {
 public:
  explicit LocalRank(std::vector<RankLane> lanes) : lanes_(std::move(lanes)) {
    std::ranges::sort(lanes_, {}, &RankLane::to_rank);
    for (std::size_t i = 0; i < lanes_.size(); ++i) {
      const RankLane& lane = lanes_[i];
      KVPOOL_CHECK(lane.route != nullptr);
      if (i > 0 && lanes_[i - 1].to_rank == lane.to_rank) {
        throw Error(ErrorCode::kArgument, "two routes to rank " + std::to_string(lane.to_rank) + " of the receiver",
                    {{"value", lane.to_rank}});
      }
      if (!lane.route->traits().one_sided) {
        throw Error(ErrorCode::kUnsupported, std::string("a rank cannot write by ") + lane.route->name() +
                                                 ": the receiver would place the bytes when it gets to it, perhaps "
                                                 "after it was told that they are there");
      }
    }
  }

  bool reaches(Medium medium) const noexcept override {
    return std::ranges::all_of(lanes_, [&](const RankLane& lane) { return lane.route->reaches(medium); });
  }

  bool serves(const RankOrder& order) const noexcept override {
    return std::ranges::all_of(order.lanes, [&](const LaneWrite& lane) { return find(lane.to_rank) != nullptr; });
  }

  double estimate_us(const RankOrder& order, std::uint64_t blocks) const noexcept override {
    double us = 0;
    for (const LaneWrite& lane : order.lanes) {
      us += find(lane.to_rank)->estimate_us(blocks * lane.strips.size(), blocks * lane.bytes);
    }
    return us;
  }

  void write(const RankOrder& order, const WriteRequest& request, Report report) override {
    WriteOutcome sum;
    WriteRequest part = request;
    part.bytes_done = nullptr;  // counted by the group, which knows how much there is
    for (const LaneWrite& lane : order.lanes) {
      part.strips = lane.strips;
      const WriteOutcome outcome = find(lane.to_rank)->write(part);
      sum.calls += outcome.calls;
      sum.bytes += outcome.bytes;
    }
    report(sum, nullptr);
  }

  // An order has ended, or its thread looks at the caller's flag: nobody else could see to it.
  void stop(std::uint64_t /*transfer*/) noexcept override {}

  void close() noexcept override {
    for (const RankLane& lane : lanes_) lane.route->close();
  }

 private:
  Route* find(std::uint32_t to_rank) const noexcept {
    const auto at = std::ranges::lower_bound(lanes_, to_rank, {}, &RankLane::to_rank);
    return at != lanes_.end() && at->to_rank == to_rank ? at->route.get() : nullptr;
  }

  std::vector<RankLane> lanes_;
};

// The reports of one write.
class Reports {
 public:
  Reports(std::uint64_t blocks, std::uint64_t bytes_sent, std::uint64_t bytes_logical,
          std::atomic<std::uint64_t>* bytes_done) noexcept
      : sent_total_(blocks * bytes_sent), logical_total_(blocks * bytes_logical), bytes_done_(bytes_done) {}

  void expect() {
    const std::lock_guard lock(mutex_);
    ++missing_;
  }

  void take(const WriteOutcome& outcome) {
    const std::lock_guard lock(mutex_);
    sum_.calls += outcome.calls;
    sum_.bytes += outcome.bytes;
    tell_progress();
    one_less();
  }

  void take(std::exception_ptr failure) {
    const std::lock_guard lock(mutex_);
    if (failure_ == nullptr) failure_ = std::move(failure);
    one_less();
  }

  bool failed() const {
    const std::lock_guard lock(mutex_);
    return failure_ != nullptr;
  }

  // Until all have reported. Calls stop() once when one has failed, or `cancelled` is set.
  template <class Stop>
  void wait(const std::atomic<bool>* cancelled, Stop&& stop) {
    std::unique_lock lock(mutex_);
    bool stopped = false;
    while (missing_ > 0) {
      const bool cancel = cancelled != nullptr && cancelled->load(std::memory_order_relaxed);
      if (!stopped && (failure_ != nullptr || cancel)) {
        stopped = true;
        lock.unlock();
        stop();
        lock.lock();
        continue;
      }
      changed_.wait_for(lock, kLookForCancel);
    }
  }

  // REQUIRES: all have reported.
  WriteOutcome result() const {
    const std::lock_guard lock(mutex_);
    if (failure_ != nullptr) std::rethrow_exception(failure_);
    return sum_;
  }

 private:
  // Notifies under the lock: the waiter may end this object as soon as it has it.
  void one_less() {
    KVPOOL_CHECK(missing_ > 0);
    --missing_;
    changed_.notify_all();
  }

  // Progress is told in bytes of the logical blocks, of which there are as many as the caller knows of: where receivers
  // hold the same, more is sent.
  void tell_progress() noexcept {
    if (bytes_done_ == nullptr || sent_total_ == 0) return;
    const double share = static_cast<double>(sum_.bytes) / static_cast<double>(sent_total_);
    const auto done = sum_.bytes >= sent_total_
                          ? logical_total_
                          : static_cast<std::uint64_t>(share * static_cast<double>(logical_total_));
    if (done <= told_) return;
    bytes_done_->fetch_add(done - told_, std::memory_order_relaxed);
    told_ = done;
  }

  const std::uint64_t sent_total_;
  const std::uint64_t logical_total_;
  std::atomic<std::uint64_t>* const bytes_done_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t missing_ = 0;
  std::exception_ptr failure_;
  WriteOutcome sum_;
  std::uint64_t told_ = 0;
};

class GroupRoute final : public Route {
 public:
  GroupRoute(std::shared_ptr<const ReshardPlan> plan, std::vector<std::unique_ptr<RankWriter>> ranks)
      : plan_(std::move(plan)), ranks_(std::move(ranks)) {
    const std::uint64_t block = plan_->from.shape().block_bytes();
    whole_ = rank_orders(*plan_, std::vector<BlockStrip>{{0, 0, block}});
    ranks_.resize(std::max<std::size_t>(ranks_.size(), plan_->from.ranks()));
    for (const RankOrder& order : whole_) {
      const RankWriter* const writer = ranks_[order.from_rank].get();
      if (writer != nullptr && writer->serves(order)) continue;
      throw Error(ErrorCode::kArgument,
                  "rank " + std::to_string(order.from_rank) + " has no route to some rank that it has something for",
                  {{"value", order.from_rank}});
    }
  }

  const char* name() const noexcept override { return "group"; }
  RouteTraits traits() const noexcept override { return {.one_sided = true, .by_caller = false, .waits = true}; }
  bool reaches(Medium medium) const noexcept override {
    return std::ranges::all_of(ranks_, [&](const auto& rank) { return rank == nullptr || rank->reaches(medium); });
  }

  // Of ranks that write one after another, so an upper bound. Pieces depend on the plan: the caller's do not matter.
  double estimate_us(std::uint64_t /*pieces*/, std::uint64_t bytes) const noexcept override {
    const std::uint64_t block = plan_->from.shape().block_bytes();
    double us = 0;
    for (const RankOrder& order : whole_)
      us += ranks_[order.from_rank]->estimate_us(order, (bytes + block - 1) / block);
    return us;
  }

  WriteOutcome write(const WriteRequest& request) override {
    const bool all = request.strips.size() == 1 && request.strips.front().from == 0 && request.strips.front().to == 0 &&
                     request.strips.front().bytes == plan_->from.shape().block_bytes();
    if (all) return carry_out(whole_, request);
    return carry_out(rank_orders(*plan_, request.strips), request);
  }

  void close() noexcept override {
    for (const auto& rank : ranks_) {
      if (rank != nullptr) rank->close();
    }
  }

 private:
  WriteOutcome carry_out(const std::vector<RankOrder>& orders, const WriteRequest& request) {
    std::uint64_t sent = 0;
    std::uint64_t logical = 0;
    for (const RankOrder& order : orders) sent += order.bytes();
    for (const BlockStrip& strip : request.strips) logical += strip.bytes;
    Reports reports(request.from.size(), sent, logical, request.bytes_done);
    std::size_t started = 0;
    for (const RankOrder& order : orders) {
      if (reports.failed()) break;
      ++started;
      start(order, request, reports);
    }
    reports.wait(request.cancelled, [&] {
      for (std::size_t i = 0; i < started; ++i) ranks_[orders[i].from_rank]->stop(request.transfer);
    });
    return reports.result();
  }

  void start(const RankOrder& order, const WriteRequest& request, Reports& reports) {
    reports.expect();
    try {
      ranks_[order.from_rank]->write(order, request, [&reports](const WriteOutcome& outcome, const Error* error) {
        if (error == nullptr) {
          reports.take(outcome);
        } else {
          reports.take(std::make_exception_ptr(*error));
        }
      });
    } catch (...) {
      reports.take(std::current_exception());
    }
  }

  const std::shared_ptr<const ReshardPlan> plan_;
  std::vector<std::unique_ptr<RankWriter>> ranks_;
  std::vector<RankOrder> whole_;  // for whole blocks, which most writes are
};

}  // namespace

std::unique_ptr<RankWriter> make_local_rank(std::vector<RankLane> lanes) {
  return std::make_unique<LocalRank>(std::move(lanes));
}

std::unique_ptr<Route> make_group_route(std::shared_ptr<const ReshardPlan> plan,
                                        std::vector<std::unique_ptr<RankWriter>> ranks) {
  return std::make_unique<GroupRoute>(std::move(plan), std::move(ranks));
}

}  // namespace kvpool
