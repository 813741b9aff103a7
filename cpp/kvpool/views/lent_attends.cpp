#include "kvpool/views/lent_attends.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "kvpool/base/clock.h"
#include "kvpool/base/failure.h"
#include "kvpool/sequences/attender.h"
#include "kvpool/transfer/failure.h"

namespace kvpool {

struct LentAttends::Job {
  Job(LentAttends& attends, std::uint64_t of, CallPointer asked_by, AttendBody&& asked, AttendRequest&& asks)
      : lent(attends), peer(of), call(std::move(asked_by)), body(std::move(asked)), request(std::move(asks)) {
    stop.until_ns = lent.stops_at_ns(*call);
    stop.also_asked = &lent.attender_.stopping();
    for (const AttendBody::Item& item : body.items) query_tokens += item.query_tokens;
  }
  ~Job() { end(); }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  // Before the answer: then the caller may reuse the blocks, and make its next call.
  void end() noexcept {
    request.entries.clear();
    if (!std::exchange(ended, true)) lent.leave(peer);
  }

  LentAttends& lent;
  const std::uint64_t peer;
  const CallPointer call;
  AttendBody body;
  AttendRequest request;
  std::uint64_t query_tokens = 0;
  AttendStop stop;
  bool ended = false;
};

bool LentAttends::reads_gpu() const noexcept { return computes() && attender_.gpu_kernel().has_value(); }

const std::atomic<bool>& LentAttends::stopping() const noexcept { return attender_.stopping(); }

void LentAttends::admit(std::uint64_t peer) {
  if (most_ == 0) throw Error(ErrorCode::kUnsupported, "this pool computes no attention for its peers");
  const std::lock_guard lock(mutex_);
  const auto entry = of_peers_.try_emplace(peer, 0).first;
  if (under_way_ >= most_ && entry->second > 0) {
    const std::int64_t wait_us = std::max<std::int64_t>(mean_ns_.load() * under_way_ / kAtOnce / 1000, 100);
    throw Error(ErrorCode::kBusy, "attention is computed for " + std::to_string(under_way_) + " calls of peers already",
                {{"limit", most_}, {"retry_after_us", wait_us}});
  }
  ++entry->second;
  ++under_way_;
}

void LentAttends::leave(std::uint64_t peer) noexcept {
  const std::lock_guard lock(mutex_);
  --under_way_;
  const auto entry = of_peers_.find(peer);
  if (--entry->second == 0) of_peers_.erase(entry);
}

void LentAttends::start(std::uint64_t peer, const CallPointer& call, AttendBody&& body, AttendRequest&& request) {
  admit(peer);
  std::shared_ptr<Job> job;
  try {
    job = std::make_shared<Job>(*this, peer, call, std::move(body), std::move(request));
  } catch (...) {
    leave(peer);
    throw;
  }
  call->when_cancelled([weak = std::weak_ptr(job)] {
    if (const auto one = weak.lock()) one->stop.asked.store(true, std::memory_order_relaxed);
  });
  const Priority priority = job->body.priority;
  run_later(peer, priority, [this, job = std::move(job)] { carry_out(*job); });
}

void LentAttends::carry_out(Job& job) noexcept {
  Bytes answer;
  const auto failure = failure_of([&] {
    const std::int64_t begin_ns = monotonic_ns();
    AttendTask task(pool_, std::move(job.request), job.query_tokens, attender_, /*for_peer=*/true);
    std::vector<PartialAttention> parts = task.run(&job.stop);
    AttendedBody body{job.body.layer, {}};
    for (std::size_t i = 0; i < parts.size(); ++i) {
      body.items.push_back({job.body.items[i].view, std::move(parts[i]).take_nodes()});
    }
    answer = write_body(body);
    measure(monotonic_ns() - begin_ns);
  });
  job.end();
  if (failure) {
    const bool closing = failure->code() == ErrorCode::kCancelled && attender_.stopping() && !job.call->cancelled();
    if (closing) return job.call->refuse(Error(ErrorCode::kPeerLost, "it was closed before it answered"));
    return job.call->refuse(for_peer(*failure));
  }
  job.call->answer(std::move(answer));
}

// The last eight or so calls count.
void LentAttends::measure(std::int64_t ns) noexcept {
  const std::int64_t mean = mean_ns_.load(std::memory_order_relaxed);
  mean_ns_.store(mean + (ns - mean) / 8, std::memory_order_relaxed);
}

}  // namespace kvpool
