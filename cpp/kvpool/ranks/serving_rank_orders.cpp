// What a scheduler asks of its rank: meetings, writes to peers, copies between the tiers; and the answers.
#include <algorithm>
#include <utility>

#include "kvpool/base/clock.h"
#include "kvpool/base/failure.h"
#include "kvpool/ranks/serving_rank.h"
#include "kvpool/routes/route_error.h"
#include "kvpool/transfer/failure.h"

namespace kvpool {
namespace {

constexpr std::int64_t kMillisecond = 1'000'000;
constexpr std::int64_t kLifetimeMax = std::int64_t{3'600'000} * kMillisecond;

std::int64_t deadline_of(std::uint64_t lifetime_ms) noexcept {
  constexpr std::uint64_t kMost = kLifetimeMax / kMillisecond;
  return monotonic_ns() + static_cast<std::int64_t>(std::min(lifetime_ms, kMost)) * kMillisecond;
}

}  // namespace

void ServingRank::on_message(Message&& message) {
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

void ServingRank::answer(FrameKind kind, std::uint64_t id, Bytes body) noexcept {
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

void ServingRank::answer(std::uint64_t id, const std::optional<Error>& failure) noexcept {
  try {
    if (failure) return answer(FrameKind::kRefused, id, write_error(for_peer(*failure)));
    answer(FrameKind::kAnswer, id, {});
  } catch (const std::exception&) {
    answer(FrameKind::kRefused, id, {});  // not even memory for the reason: it ends the link
  }
}

void ServingRank::on_meet(std::uint64_t id, MeetBody&& body) {
  const std::int64_t deadline = deadline_of(body.lifetime_ms);
  const auto kept = std::make_shared<const MeetBody>(std::move(body));
  // It may wait for a peer: not where blocks are copied.
  waits_.run(kept.get(), Priority::kDecode,
             [this, id, deadline, kept] { answer(id, failure_of([&] { channels_.meet(*kept, deadline); })); });
}

void ServingRank::on_order(std::uint64_t id, OrderBody&& body) {
  const auto kept = std::make_shared<const OrderBody>(std::move(body));
  ChannelOrder order;
  order.meeting = kept->meeting;
  order.channels = kept->channels;
  order.request.transfer = id;
  order.request.from = kept->from;
  order.request.to = kept->to;
  order.request.merge = kept->merge;
  order.request.gather = kept->merge;
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

void ServingRank::on_stop(std::uint64_t id) {
  const std::lock_guard lock(mutex_);
  const auto entry = orders_.find(id);
  if (entry != orders_.end()) entry->second->store(true, std::memory_order_relaxed);
}

void ServingRank::on_copy(std::uint64_t id, CopyBody&& body) {
  copies_.run(Priority::kDecode, [this, id, body = std::move(body)] {
    const auto failure = failure_of([&] { tiers_->copy(routes_.memory(), body); });
    if (failure && failure->code() == ErrorCode::kDeviceLost) return lose(*failure);
    answer(id, failure);
  });
}

}  // namespace kvpool
