#include "kvpool/routes/nccl/nccl_inbox.h"

#include <algorithm>
#include <utility>

#include "kvpool/base/clock.h"
#include "kvpool/base/error.h"
#include "kvpool/cuda/lasting.h"
#include "kvpool/net/data_body.h"
#include "kvpool/net/reactor.h"

namespace kvpool {
namespace {

constexpr std::int64_t kNsPerMs = 1'000'000;

std::string text_of(const std::exception& error) noexcept {
  try {
    return error.what();
  } catch (const std::bad_alloc&) {
    return {};
  }
}

// Whether the sender should try again.
NcclOutcome outcome_of(const std::exception& failure) noexcept {
  const auto* const error = dynamic_cast<const Error*>(&failure);
  return error != nullptr && is_lasting(*error) ? NcclOutcome::kUnable : NcclOutcome::kFailed;
}

}  // namespace

NcclInbox::NcclInbox(const NcclMemory& memory, std::weak_ptr<Link> link, RouteRun run)
    : local_(memory.local),
      init_ns_(memory.limits.init_ns),
      pass_ns_(memory.limits.pass_ns),
      link_(std::move(link)),
      run_(std::move(run)),
      pipe_(memory, NcclWay::kReceive) {}

void NcclInbox::begin(Admit admit, Placed placed, Lost lost) {
  admit_ = std::move(admit);
  placed_ = std::move(placed);
  lost_ = std::move(lost);
}

void NcclInbox::on_message(Message&& message) {
  switch (message.kind) {
    case FrameKind::kChannel: {
      const NcclChannelBody channel = read_channel(message.body);
      pass_bytes_max_ = channel.pass_bytes;
      return push(channel);
    }
    case FrameKind::kPass:
      return announce(std::move(message));
    case FrameKind::kHalt: {
      const std::uint64_t generation = read_halt(message.body);
      if (generation > halted_.load(std::memory_order_relaxed)) halted_.store(generation);
      return;
    }
    default:
      throw Error(ErrorCode::kProtocol, "this is nothing that is said of NCCL");
  }
}

void NcclInbox::announce(Message&& message) {
  Pass pass;
  pass.body = read_pass(message.body);
  pass.transfer = message.id;
  if (pass.body.number != announced_ + 1) throw Error(ErrorCode::kProtocol, "content by NCCL is not in order");
  if (pass.body.bytes > pass_bytes_max_) {
    throw Error(ErrorCode::kProtocol, "a pass of " + std::to_string(pass.body.bytes) + " bytes by NCCL; " +
                                          std::to_string(pass_bytes_max_) + " were announced");
  }
  {
    const std::lock_guard lock(mutex_);
    if (passes_ >= kNcclPassesMax) {
      throw Error(ErrorCode::kProtocol, std::to_string(passes_) + " passes by NCCL wait for their turn",
                  {{"limit", static_cast<std::int64_t>(kNcclPassesMax)}});
    }
  }
  ++announced_;
  const auto lifetime_ms = std::min(pass.body.lifetime_ms, static_cast<std::uint64_t>(pass_ns_ / kNsPerMs));
  pass.deadline_ns = monotonic_ns() + static_cast<std::int64_t>(lifetime_ms) * kNsPerMs;
  const Placement placement = admit_(message.id, pass.body.data, pass.body.bytes);
  pass.admitted = !placement.pieces.empty();
  pass.token = placement.token;
  try {
    push(std::move(pass));
  } catch (...) {
    if (!placement.pieces.empty()) placed_(placement.token, false);
    throw;
  }
}

// A sender that opens another communicator has left the one before, which is not joined any more if it is the last that
// waits. Throws kProtocol when too many wait. REQUIRES: mutex_ is held.
void NcclInbox::make_room(const Work& work) {
  if (!std::holds_alternative<NcclChannelBody>(work)) return;
  if (!queue_.empty() && std::holds_alternative<NcclChannelBody>(queue_.back())) {
    queue_.pop_back();
    --channels_;
  }
  if (channels_ < kNcclChannelsMax) return;
  throw Error(ErrorCode::kProtocol, std::to_string(channels_) + " communicators of NCCL wait to be joined",
              {{"limit", static_cast<std::int64_t>(kNcclChannelsMax)}});
}

// Where no thread can be had for it, the work is as if it had never come. Others may have added theirs meanwhile, and
// rely on the thread that was to be: that is done here.
void NcclInbox::push(Work&& work) {
  std::list<Work> added;
  added.push_back(std::move(work));
  const auto pushed = added.begin();
  std::size_t& count = std::holds_alternative<Pass>(*pushed) ? passes_ : channels_;
  {
    const std::lock_guard lock(mutex_);
    make_room(*pushed);
    queue_.splice(queue_.end(), added);
    ++count;
    if (std::exchange(working_, true)) return;
  }
  try {
    run_(this, [self = shared_from_this()] { self->work_off(); });
  } catch (...) {
    {
      const std::lock_guard lock(mutex_);
      queue_.erase(pushed);  // it is there: nobody works here
      --count;
    }
    work_off();
    throw;
  }
}

void NcclInbox::work_off() noexcept {
  std::unique_lock lock(mutex_);
  const auto is_more = [this] { return !queue_.empty() || on_closed_; };
  while (is_more()) {
    carry_out_next(lock);
    if (!is_more()) break;
    lock.unlock();
    if (goes_on_later()) return;  // no other thread begins meanwhile: working_ says that one works
    lock.lock();
  }
  working_ = false;
}

// Behind what waits for other peers. False: there is no memory for it, or the executor has ended.
bool NcclInbox::goes_on_later() noexcept {
  try {
    run_(this, [self = shared_from_this()] { self->work_off(); });
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

// The end of the link comes behind all else. REQUIRES: there is work; `lock` is held, also afterwards.
void NcclInbox::carry_out_next(std::unique_lock<std::mutex>& lock) noexcept {
  if (queue_.empty()) {
    const std::function<void()> on_closed = std::exchange(on_closed_, nullptr);
    lock.unlock();
    pipe_.let_go();  // this may live on, and others need the GPU
    on_closed();
    lock.lock();
    return;
  }
  Work work = std::move(queue_.front());
  queue_.pop_front();
  if (std::holds_alternative<NcclChannelBody>(work)) --channels_;
  lock.unlock();
  carry_out(work);
  work = std::function<void()>();  // what it keeps goes without the lock
  lock.lock();
}

void NcclInbox::carry_out(Work& work) noexcept {
  if (auto* const channel = std::get_if<NcclChannelBody>(&work)) {
    try {
      open(*channel);
    } catch (const std::exception& error) {
      NcclPassedBody failed;
      note(error, failed);
      answer(channel->generation, failed);
    }
    return;
  }
  if (auto* const pass = std::get_if<Pass>(&work)) {
    const NcclPassedBody outcome = receive(*pass);
    if (pass->admitted) placed_(pass->token, outcome.outcome == NcclOutcome::kPlaced);
    {
      const std::lock_guard lock(mutex_);
      --passes_;
    }
    return answer(pass->transfer, outcome);
  }
  if (auto* const deferred = std::get_if<std::function<void()>>(&work)) (*deferred)();
}

// Throws what ends the waiting for a peer, or for what it sends.
void NcclInbox::check(std::uint64_t generation, std::int64_t deadline_ns) const {
  if (closed_.load(std::memory_order_relaxed)) throw Error(ErrorCode::kPeerLost, "the link has ended");
  if (halted_.load(std::memory_order_relaxed) >= generation) {
    throw Error(ErrorCode::kCancelled, "the sender has left the communicator");
  }
  if (monotonic_ns() >= deadline_ns) throw Error(ErrorCode::kDeadline, "nothing has come by NCCL in time");
}

void NcclInbox::open(const NcclChannelBody& channel) {
  const std::int64_t deadline_ns = monotonic_ns() + init_ns_;
  pipe_.shut();
  generation_ = 0;
  pipe_.open(channel.id, channel.pass_bytes, [&] { check(channel.generation, deadline_ns); });
  generation_ = channel.generation;
}

NcclPassedBody NcclInbox::receive(Pass& pass) noexcept {
  NcclPassedBody outcome;
  outcome.number = pass.body.number;
  try {
    if (!pass.admitted) {
      outcome.outcome = NcclOutcome::kRefused;
      outcome.why = "the sender may not write a block, or no longer";
      pipe_.shut();  // it may have begun to send
      return outcome;
    }
    if (!pipe_.is_open() || generation_ != pass.body.generation) {
      outcome.why = "there is no communicator: it could not be made, or has failed";
      return outcome;
    }
    const DataBody data = read_data_body(pass.body.data, pass.body.bytes, local_);
    pipe_.pass({data.ranges, data.blocks, pass.body.bytes, pass.body.message_bytes},
               [&] { check(pass.body.generation, pass.deadline_ns); });
    outcome.outcome = NcclOutcome::kPlaced;
  } catch (const std::exception& error) {
    pipe_.shut();
    note(error, outcome);
  }
  return outcome;
}

void NcclInbox::note(const std::exception& failure, NcclPassedBody& outcome) noexcept {
  outcome.outcome = outcome_of(failure);
  outcome.why = text_of(failure);
  const auto* const error = dynamic_cast<const Error*>(&failure);
  if (error != nullptr && error->code() == ErrorCode::kDeviceLost) lost_(*error);
}

void NcclInbox::answer(std::uint64_t id, const NcclPassedBody& body) noexcept {
  const auto link = link_.lock();
  if (link == nullptr || closed_.load()) return;  // what the sender is to hear is that this side has gone
  try {
    link->send(Message{FrameKind::kPassed, 0, id, write_body(body)});
  } catch (const Error& error) {
    link->close(error);  // threads that wait for it see the end of the link
  } catch (const std::exception& error) {
    link->close(Error(ErrorCode::kOutOfMemory, error.what()));
  }
}

bool NcclInbox::defer(std::function<void()>& work) {
  const std::lock_guard lock(mutex_);
  if (passes_ == 0) return false;
  queue_.emplace_back(std::move(work));
  return true;
}

void NcclInbox::close(std::function<void()> on_closed) noexcept {
  stop();
  {
    const std::lock_guard lock(mutex_);
    on_closed_ = std::move(on_closed);
    if (std::exchange(working_, true)) return;
  }
  try {
    run_(this, [self = shared_from_this()] { self->work_off(); });
  } catch (const std::exception&) {  // no memory, or the executor has ended: then here
    work_off();
  }
}

}  // namespace kvpool
