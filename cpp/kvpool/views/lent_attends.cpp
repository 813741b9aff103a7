#include "kvpool/views/lent_attends.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "kvpool/base/clock.h"
#include "kvpool/base/failure.h"
#include "kvpool/transfer/failure.h"

namespace kvpool {

struct LentAttends::Job {
  Job(LentAttends& attends, CallPointer of, AttendBody&& asked, AttendRequest&& asks)
      : lent(attends), call(std::move(of)), body(std::move(asked)), request(std::move(asks)) {
    stop.until_ns = call->deadline_ns();
    for (const AttendBody::Item& item : body.items) query_tokens += item.query_tokens;
  }
  ~Job() { lent.under_way_.fetch_sub(1); }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  LentAttends& lent;
  const CallPointer call;
  AttendBody body;
  AttendRequest request;
  std::uint64_t query_tokens = 0;
  AttendStop stop;
};

void LentAttends::admit() {
  std::uint32_t before = under_way_.load();
  do {
    if (before < most_) continue;
    if (most_ == 0) throw Error(ErrorCode::kUnsupported, "this pool computes no attention for its peers");
    const std::int64_t wait_us = std::max<std::int64_t>(mean_ns_.load() * before / kAtOnce / 1000, 100);
    throw Error(ErrorCode::kBusy, "attention is computed for " + std::to_string(before) + " calls of peers already",
                {{"limit", most_}, {"retry_after_us", wait_us}});
  } while (!under_way_.compare_exchange_weak(before, before + 1));
}

void LentAttends::start(std::uint64_t peer, const CallPointer& call, AttendBody&& body, AttendRequest&& request) {
  admit();
  std::shared_ptr<Job> job;
  try {
    job = std::make_shared<Job>(*this, call, std::move(body), std::move(request));
  } catch (...) {
    under_way_.fetch_sub(1);
    throw;
  }
  call->when_cancelled([weak = std::weak_ptr(job)] {
    if (const auto one = weak.lock()) one->stop.asked.store(true, std::memory_order_relaxed);
  });
  const Priority priority = job->body.priority;
  calls_.run(peer, priority, [this, job = std::move(job)] { carry_out(*job); });
}

void LentAttends::carry_out(Job& job) noexcept {
  Bytes answer;
  const auto failure = failure_of([&] {
    const std::int64_t begin_ns = monotonic_ns();
    AttendTask task(pool_, std::move(job.request), job.query_tokens, attender_);
    std::vector<PartialAttention> parts = task.run(&job.stop);
    AttendedBody body{job.body.layer, task.plan().kernel, {}};
    for (std::size_t i = 0; i < parts.size(); ++i) {
      body.items.push_back({job.body.items[i].view, std::move(parts[i]).take_nodes()});
    }
    answer = write_body(body);
    measure(monotonic_ns() - begin_ns);
  });
  job.request.entries.clear();  // before the answer: then the caller may reuse the blocks
  if (failure) return job.call->refuse(for_peer(*failure));
  job.call->answer(std::move(answer));
}

// The last eight or so calls count.
void LentAttends::measure(std::int64_t ns) noexcept {
  const std::int64_t mean = mean_ns_.load(std::memory_order_relaxed);
  mean_ns_.store(mean + (ns - mean) / 8, std::memory_order_relaxed);
}

}  // namespace kvpool
