// Swaps whose callers do not wait: docs/adr/0015-swaps-go-both-ways-at-once.md.
#include <utility>

#include "kvpool/base/error.h"
#include "kvpool/cuda/order.h"
#include "kvpool/pool/pool.h"
#include "kvpool/pool/swap_threads.h"
#include "kvpool/transfer/failure.h"

namespace kvpool {

// REQUIRES: mutex_ is held, here and below.
Turnover Pool::turnover() noexcept { return {counters_.inserted_blocks, store(Medium::kHbm).released()}; }

// What a copy between blocks that have just been chosen has to follow. An order that was met before says nothing of
// work that the GPU was given later: it may still fill what was inserted since, and read what was freed since. Which
// stream it is in nobody has said, so that is the whole device. Of blocks of DRAM the work has ended when they are
// freed: the CPU may have them next.
CopyOrder Pool::renewed(TierWay way, const CopyOrder& after) noexcept {
  if (!on_device_ || !after.is_met()) return after;
  const Turnover now = turnover();
  const bool same = way == TierWay::kOut ? now.filled == after.since().filled : now.freed == after.since().freed;
  return same ? after : CopyOrder(std::nullopt);
}

// What was given to the GPU until now is noted here, in the caller's thread.
std::shared_ptr<Swap> Pool::make_swap(const CallerStream& after) {
  check_stream(after);
  std::shared_ptr<const DeviceOrder> order;
  Turnover since;  // read before the order is taken: what comes between the two counts as later
  if (on_device_) {
    const std::lock_guard lock(mutex_);
    since = turnover();
  }
  try {
    if (on_device_) order = DeviceOrder::after_now(arena(Medium::kHbm)->context(), after);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kDeviceLost) fail(error);
    throw;
  }
  return std::make_shared<Swap>(*this, std::move(order), since);
}

// Waits until bytes may move. Returns why they may not.
std::optional<Error> Pool::wait_to_begin(Swap& swap) {
  auto failure = failure_of([&] { swap.begin(); });
  if (failure && failure->code() == ErrorCode::kDeviceLost) fail(*failure);
  return failure;
}

std::shared_ptr<Swap> Pool::begin_swap_out(std::size_t n, const CallerStream& after) {
  guard();
  check_two_tiers();
  auto swap = make_swap(after);
  swap_threads_->run(TierWay::kOut, swap, [this, swap, n] {
    std::vector<Address> moved;
    auto failure = wait_to_begin(*swap);
    if (!failure) failure = failure_of([&] { moved = carry_out_swap(n, swap->order()); });
    failure ? swap->fail(*failure) : swap->succeed(std::move(moved), {});
  });
  return swap;
}

std::shared_ptr<Swap> Pool::begin_swap_in(std::span<const Address> addresses, std::span<const Address> into,
                                          const CallerStream& after) {
  guard();
  auto swap = make_swap(after);
  const auto inbound = std::make_shared<Inbound>();
  begin_inbound(addresses, into, *inbound);
  try {
    swap_threads_->run(TierWay::kIn, swap, [this, swap, inbound] {
      auto failure = wait_to_begin(*swap);
      if (failure) {
        abandon_inbound(*inbound);
      } else {
        failure = failure_of([&] { finish_inbound(*inbound, swap->order()); });
      }
      failure ? swap->fail(*failure) : swap->succeed(std::move(inbound->addresses), std::move(inbound->held));
    });
  } catch (...) {
    abandon_inbound(*inbound);
    throw;
  }
  return swap;
}

}  // namespace kvpool
