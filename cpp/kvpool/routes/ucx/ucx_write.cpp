#include "kvpool/routes/ucx/ucx_write.h"

#include <poll.h>

#include <algorithm>

#include "kvpool/base/clock.h"
#include "kvpool/net/reactor.h"
#include "kvpool/routes/ucx/ucx_context.h"

namespace kvpool {
namespace {

constexpr std::size_t kPutBytesMax = std::size_t{4} << 20;       // so that a deadline is noticed within a long run
constexpr std::size_t kPendingBytesMax = std::size_t{16} << 20;  // of one write: bounds what a flush waits for
constexpr std::size_t kSlicePuts = 64;                           // then others get at the worker
constexpr std::size_t kSliceBytes = std::size_t{1} << 20;
constexpr std::int64_t kProcessLookNs = 50'000'000;
constexpr std::int64_t kLookNs = 5'000'000;       // how often a waiting write looks whether it was cancelled
constexpr std::int64_t kGraceNs = 20'000'000;     // for the flush of a write that is late or cancelled
constexpr std::int64_t kLetGoNs = 2'000'000'000;  // for UCX, to complete what a closed endpoint had under way

// Of a put for which UCX has no way between the two kinds of memory: its newer protocols take the put and cancel it, at
// once or later, where the older ones refuse it.
bool says_no_way(ucs_status_t why) noexcept {
  return why == UCS_ERR_UNSUPPORTED || why == UCS_ERR_UNREACHABLE || why == UCS_ERR_CANCELED;
}

}  // namespace

void UcxWrite::Pending::note(ucs_status_t why, const Slot& of) noexcept {
  const bool no_way = of.bytes > 0 && says_no_way(why);  // a flush has none
  ucs_status_t& first = no_way ? unable : status;
  if (first == UCS_OK) first = why;
  if (no_way) kinds_unable |= of.kind;
}

UcxWrite::UcxWrite(UcxWorker& worker, std::shared_ptr<UcxPeer> peer, const WriteRequest& request,
                   const std::string& name, int pidfd)
    : worker_(worker),
      peer_(std::move(peer)),
      request_(request),
      name_(name),
      pidfd_(pidfd),
      current_(worker.context().gpu()),
      pending_(std::make_unique<Pending>()) {
  pending_->worker = &worker_;
  pending_->free_count = pending_->slots.size();
  for (std::size_t i = 0; i < pending_->slots.size(); ++i) {
    pending_->slots[i] = {pending_.get(), 0, 0};
    pending_->free[i] = &pending_->slots[i];
  }
  lock_ = worker_.lock();
  worker_.enter(lock_);
}

UcxWrite::~UcxWrite() {
  if (pending_->count() > 0) abandon();  // an exception from elsewhere
  worker_.leave(lock_);
}

// UCX calls it from progress(), under the worker's lock.
void UcxWrite::on_done(void* request, ucs_status_t status, void* slot) noexcept {
  auto* done = static_cast<Pending::Slot*>(slot);
  Pending& pending = *done->pending;
  pending.bytes -= done->bytes;
  if (status == UCS_OK) {
    pending.bytes_done += done->bytes;
  } else {
    pending.note(status, *done);
  }
  pending.free[pending.free_count++] = done;
  pending.worker->ucx().request_free(request);
  pending.worker->note_completion();
}

// For the operation that start() is called with next: it takes the slot that is on top of the free ones.
ucp_request_param_t UcxWrite::params_for(std::size_t bytes, std::uint8_t kind) noexcept {
  Pending::Slot* slot = pending_->free[pending_->free_count - 1];
  slot->bytes = bytes;
  slot->kind = kind;
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  params.cb.send = [](void* request, ucs_status_t status, void* data) { on_done(request, status, data); };
  params.user_data = slot;
  return params;
}

bool UcxWrite::start(ucs_status_ptr_t request, std::size_t bytes) noexcept {
  if (request == nullptr) {
    pending_->bytes_done += bytes;
  } else if (UCS_PTR_IS_ERR(request)) {
    pending_->note(UCS_PTR_STATUS(request), *pending_->free[pending_->free_count - 1]);
    stop_ = pending_->status == UCS_OK ? Stop::kUnable : Stop::kLost;
    return false;
  } else {
    --pending_->free_count;
    pending_->bytes += bytes;
  }
  return true;
}

bool UcxWrite::put(std::span<const CopyPiece> pieces) {
  for (const CopyPiece& piece : pieces) {
    outcome_.calls += 1;  // however many puts it takes
    outcome_.pieces += 1;
    const std::byte* from = piece.src;
    auto to = reinterpret_cast<std::uint64_t>(piece.dst);
    std::size_t left = piece.bytes;
    while (left > 0) {
      const UcxPeer::Region* remote = peer_->find(to);
      const UcxMemory::Region* local = worker_.context().memory().find(from);
      if (remote == nullptr || local == nullptr) {
        throw Error(ErrorCode::kArgument, "a block lies outside of the memory that was registered with UCX");
      }
      const std::size_t bytes =
          std::min<std::uint64_t>({left, kPutBytesMax, remote->base + remote->bytes - to,
                                   local->base + local->bytes - reinterpret_cast<std::uint64_t>(from)});
      if (!between_slices() || !wait_for_room(bytes)) return false;
      ucp_request_param_t params = params_for(bytes, ucx_kind(local->on_gpu, remote->on_gpu));
      params.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
      params.memh = local->handle;
      if (local->on_gpu) {
        params.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMORY_TYPE;
        params.memory_type = UCS_MEMORY_TYPE_CUDA;
      }
      if (!start(worker_.ucx().put_nbx(peer_->endpoint, from, bytes, to, remote->key, &params), bytes)) return false;
      started_ = true;
      outcome_.bytes += bytes;
      slice_puts_ += 1;
      slice_bytes_ += bytes;
      from += bytes;
      to += bytes;
      left -= bytes;
    }
  }
  return true;
}

// At the start of a write, and then after each slice: lets others at the worker, and looks whether to go on.
bool UcxWrite::between_slices() {
  const bool first = !started_;
  if (!first && slice_puts_ < kSlicePuts && slice_bytes_ < kSliceBytes) return true;
  slice_puts_ = 0;
  slice_bytes_ = 0;
  if (!first) {
    worker_.progress(lock_);
    report_progress();
    if (worker_.wanted()) {
      lock_.unlock();
      lock_.lock();
    }
  }
  look_at_process();
  stop_ = look_for_stop(monotonic_ns());
  return stop_ == Stop::kNone;
}

void UcxWrite::look_at_process() noexcept {
  if (pidfd_ < 0) return;
  pollfd gone{pidfd_, POLLIN, 0};
  process_gone_ = poll(&gone, 1, 0) > 0;
}

template <class Done>
bool UcxWrite::wait(std::int64_t deadline_ns, Done&& done) {
  for (;;) {
    const std::int64_t until = pidfd_ < 0 ? deadline_ns : std::min(deadline_ns, monotonic_ns() + kProcessLookNs);
    if (worker_.wait(lock_, until, [&] { return done() || lost(); })) return true;
    look_at_process();
    if (!process_gone_ && until == deadline_ns) return false;
  }
}

bool UcxWrite::has_room(std::size_t bytes) const noexcept {
  // One slot is the flush's.
  return pending_->free_count > 1 && (pending_->bytes == 0 || pending_->bytes + bytes <= kPendingBytesMax);
}

bool UcxWrite::wait_for_room(std::size_t bytes) {
  while (!has_room(bytes)) {
    const std::int64_t now = monotonic_ns();
    worker_.wait(lock_, std::min(request_.deadline_ns, now + kLookNs),
                 [&] { return has_room(bytes) || lost() || pending_->unable != UCS_OK; });
    look_at_process();
    report_progress();
    stop_ = look_for_stop(monotonic_ns());
    if (stop_ != Stop::kNone) return false;
  }
  return true;
}

bool UcxWrite::lost() noexcept {
  return process_gone_ || peer_->endpoint == nullptr || peer_->failed || pending_->status != UCS_OK;
}

UcxWrite::Stop UcxWrite::look_for_stop(std::int64_t now_ns) noexcept {
  if (lost()) return Stop::kLost;
  if (request_.cancelled != nullptr && request_.cancelled->load(std::memory_order_relaxed)) return Stop::kCancelled;
  if (pending_->unable != UCS_OK) return Stop::kUnable;
  return now_ns >= request_.deadline_ns ? Stop::kDeadline : Stop::kNone;
}

void UcxWrite::report_progress() noexcept {
  if (request_.bytes_done != nullptr) {
    request_.bytes_done->fetch_add(pending_->bytes_done - told_, std::memory_order_relaxed);
  }
  told_ = pending_->bytes_done;
}

bool UcxWrite::flush() {
  // Puts whose room the flush needs.
  if (!wait(request_.deadline_ns + kGraceNs, [&] { return pending_->free_count > 0; }) || lost()) return false;
  const ucp_request_param_t params = params_for(0, 0);
  if (!start(worker_.ucx().ep_flush_nbx(peer_->endpoint, &params), 0)) return false;
  // A cancelled one waits, too, for as long as it may: what is under way to the peer cannot be called back.
  wait(std::max(request_.deadline_ns, monotonic_ns()) + kGraceNs, [&] { return pending_->count() == 0; });
  return pending_->count() == 0 && !lost();
}

// A put that was cancelled says that there is no way, or that the endpoint is about to fail. The flush tells: it works
// on an endpoint that stands, and then nothing of this write is under way any more.
WriteOutcome UcxWrite::finish() {
  const bool doubted = pending_->unable != UCS_OK && pending_->unable != UCS_ERR_UNSUPPORTED;
  const bool flushed = (!started_ && !doubted) || (!lost() && flush());
  if (!flushed || lost()) {
    abandon();
    throw_stop(Stop::kLost);
  }
  report_progress();
  if (stop_ == Stop::kNone && pending_->unable != UCS_OK) stop_ = Stop::kUnable;
  if (stop_ != Stop::kNone) throw_stop(stop_);
  return outcome_;
}

// Makes UCX let go. The endpoint is lost with it: puts cannot be taken back one by one.
void UcxWrite::abandon() noexcept {
  if (started_ || pending_->count() > 0 || lost()) worker_.shut(lock_, *peer_);
  if (worker_.wait(lock_, monotonic_ns() + kLetGoNs, [&] { return pending_->count() == 0; })) return;
  // UCX broke its word. What it may still call back with stays where it is.
  static_cast<void>(pending_.release());
  pending_ = std::make_unique<Pending>();
  pending_->free_count = pending_->slots.size();
}

void UcxWrite::throw_stop(Stop why) {
  switch (why) {
    case Stop::kCancelled:
      throw Error(ErrorCode::kCancelled, "the write to " + name_ + " was cancelled");
    case Stop::kDeadline:
      throw Error(ErrorCode::kDeadline, "the write to " + name_ + " was not done by its deadline");
    case Stop::kUnable:
      throw Error(ErrorCode::kUnsupported, "UCX " + worker_.ucx().version + " has no way from this memory to that of " +
                                               name_ + ": it says " + worker_.ucx().status_string(pending_->unable));
    default:
      break;
  }
  std::string text = "the peer " + name_ + " is lost: ";
  if (process_gone_) {
    text += "its process has ended";
  } else if (peer_->failed) {
    text += std::string("UCX says ") + worker_.ucx().status_string(peer_->why);
  } else if (pending_->status != UCS_OK && pending_->status != UCS_ERR_CANCELED) {
    text += std::string("UCX says ") + worker_.ucx().status_string(pending_->status);
  } else if (monotonic_ns() >= request_.deadline_ns) {
    text += "it did not confirm what was written by the deadline";
  } else {
    text += "its UCX route was closed";
  }
  throw Error(ErrorCode::kPeerLost, text);
}

}  // namespace kvpool
