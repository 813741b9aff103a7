#include "kvpool/ranks/group_route.h"

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

  // What a rank could not end may still be written: no other failure, which would say that nothing is, hides that.
  void take(std::exception_ptr failure, bool may_still_write) {
    const std::lock_guard lock(mutex_);
    if (failure_ == nullptr || may_still_write) failure_ = std::move(failure);
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
      if (ranks_[order.from_rank] != nullptr) continue;
      throw Error(ErrorCode::kArgument,
                  "nobody writes for rank " + std::to_string(order.from_rank) + ", which has something to send",
                  {{"value", order.from_rank}});
    }
  }

  const char* name() const noexcept override { return "group"; }
  RouteTraits traits() const noexcept override {
    return {.one_sided = true, .by_caller = false, .waits = true, .whole = false};
  }
  // The only route between two instances: the ranks choose among theirs.
  double estimate_us(const MediaSet& /*from*/, const MediaSet& /*to*/, const WriteSize& /*size*/,
                     std::int64_t /*now_ns*/) const noexcept override {
    return 0;
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
          reports.take(std::make_exception_ptr(*error), error->code() == ErrorCode::kPeerLost);
        }
      });
    } catch (...) {
      reports.take(std::current_exception(), /*may_still_write=*/false);  // it was given no order
    }
  }

  const std::shared_ptr<const ReshardPlan> plan_;
  std::vector<std::unique_ptr<RankWriter>> ranks_;
  std::vector<RankOrder> whole_;  // for whole blocks, which most writes are
};

}  // namespace

std::unique_ptr<Route> make_group_route(std::shared_ptr<const ReshardPlan> plan,
                                        std::vector<std::unique_ptr<RankWriter>> ranks) {
  return std::make_unique<GroupRoute>(std::move(plan), std::move(ranks));
}

}  // namespace kvpool
