#include "kvpool/pool/swap_handle.h"

#include <limits>

namespace kvpool {

Swap::~Swap() {
  if (!pins_.empty()) pool_.unpin(pins_.data(), pins_.size());
}

bool Swap::wait(std::int64_t until_ns) {
  if (!done()) completion_.sleep_until(until_ns);
  return done();
}

void Swap::rethrow_if_failed() const {
  if (completion_.error()) throw Error(*completion_.error());
}

bool Swap::stop(Phase how) noexcept {
  Phase before = Phase::kWaiting;
  if (!phase_.compare_exchange_strong(before, how)) return before == how && !done();
  stopped_.store(true, std::memory_order_relaxed);
  return true;
}

void Swap::throw_stopped(Phase how) {
  if (how == Phase::kClosed) throw Error(ErrorCode::kClosed, "the pool was closed before the swap had begun");
  throw Error(ErrorCode::kCancelled, "the swap was cancelled");
}

void Swap::check() const {
  const Phase phase = phase_.load();
  if (phase == Phase::kCancelled || phase == Phase::kClosed) throw_stopped(phase);
  if (stopped_.load(std::memory_order_relaxed)) throw Error(ErrorCode::kClosed, "the pool was closed during the swap");
}

void Swap::start() {
  const std::shared_ptr<const DeviceOrder> after = std::move(after_);  // lets go of its event
  check();
  if (after != nullptr) follow(*after, since_);
}

void Swap::follow(const DeviceOrder& order, const ReuseCounts& since) {
  try {
    order.wait(std::numeric_limits<std::int64_t>::max(), &stopped_);
  } catch (const Error&) {
    check();
    throw;
  }
  since_ = since;
}

void Swap::begin() {
  Phase before = Phase::kWaiting;
  if (!phase_.compare_exchange_strong(before, Phase::kBegun) && before != Phase::kBegun) throw_stopped(before);
}

void Swap::succeed(std::vector<Address>&& addresses, std::vector<IndexPin>&& pins) noexcept {
  addresses_ = std::move(addresses);
  pins_ = std::move(pins);
  completion_.finish();
}

}  // namespace kvpool
