#include "kvpool/routes/ucx/ucx_worker.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "kvpool/base/clock.h"
#include "kvpool/net/reactor.h"
#include "kvpool/routes/peer_memory.h"
#include "kvpool/routes/ucx/ucx_context.h"
#include "kvpool/routes/ucx/ucx_route.h"

namespace kvpool {
namespace {

constexpr int kProgressRounds = 64;  // in a row: bounds how long the lock is held
constexpr std::int64_t kSpinNs = 50'000;
constexpr std::int64_t kCloseNs = 5'000'000'000;
constexpr unsigned kMinorClosesClean = 15;  // of version 1
constexpr std::int64_t kOldCloseNs = 50'000'000;

// UCX calls it from progress(), under the worker's lock.
void on_endpoint_error(void* argument, ucp_ep_h, ucs_status_t status) {
  auto& peer = *static_cast<UcxPeer*>(argument);
  if (!peer.failed) {
    peer.failed = true;
    peer.why = status;
  }
  peer.worker->note_completion();
}

void on_endpoint_closed(void* request, ucs_status_t, void* argument) {
  auto& peer = *static_cast<UcxPeer*>(argument);
  --peer.closing;
  peer.worker->ucx().request_free(request);
  peer.worker->note_completion();
}

// Which of the peer's regions are its GPU's: no region holds blocks of two media.
void note_gpu(UcxPeer& peer, const MediaSpans& remote, const MediaSet& on_gpu) noexcept {
  for (UcxPeer::Region& region : peer.regions) {
    for (std::size_t i = 0; i < remote.size(); ++i) {
      for (const Segment& segment : remote[i].segments) {
        const auto base = reinterpret_cast<std::uint64_t>(segment.base);
        if (on_gpu[i] && base >= region.base && base - region.base < region.bytes) region.on_gpu = true;
      }
    }
  }
}

}  // namespace

const UcxPeer::Region* UcxPeer::find(std::uint64_t address) const noexcept {
  const auto next = std::upper_bound(regions.begin(), regions.end(), address,
                                     [](std::uint64_t value, const Region& region) { return value < region.base; });
  if (next == regions.begin()) return nullptr;
  return address - (next - 1)->base < (next - 1)->bytes ? &*(next - 1) : nullptr;
}

UcxWorker::UcxWorker(std::shared_ptr<UcxContext> context) : context_(std::move(context)), ucx_(context_->ucx()) {
  const UcxGpuScope current(context_->gpu());
  const UcxLock lock(lock_);
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  ucx_.require(ucx_.worker_create(context_->handle(), &params, &worker_), "ucp_worker_create");
  try {
    ucx_.require(ucx_.worker_get_efd(worker_, &descriptor_), "ucp_worker_get_efd");
    ucp_address_t* address = nullptr;
    std::size_t bytes = 0;
    ucx_.require(ucx_.worker_get_address(worker_, &address, &bytes), "ucp_worker_get_address");
    blob_ = write_ucx_blob(ucx_.version, {reinterpret_cast<const std::byte*>(address), bytes},
                           context_->memory().regions());
    ucx_.worker_release_address(worker_, address);
    wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_ < 0) throw Error(ErrorCode::kState, "no descriptor is left for UCX");
    watch_ = context_->thread().add(descriptor_, [this] { serve(); });  // which waits for the lock
  } catch (...) {
    if (wake_ >= 0) ::close(wake_);
    ucx_.worker_destroy(worker_);
    throw;
  }
}

UcxWorker::~UcxWorker() {
  if (context_->forked()) return;
  if (!close()) {
    context_->thread().remove(watch_);
    context_->keep(peers_);
  }
  ::close(wake_);
}

std::shared_ptr<UcxRoute> UcxWorker::make_route(const PeerMetadata& metadata, int pidfd) {
  context_->require_no_fork();
  const UcxBlob blob = read_ucx_blob(metadata.ucx);
  const MediaSpans remote = remote_spans(metadata, require_covered(metadata, blob));
  MediaSet on_gpu{};
  for (std::size_t i = 0; i < on_gpu.size(); ++i) on_gpu[i] = metadata.media[i].kind == MemoryKind::kGpu;
  const UcxGpuScope current(context_->gpu());
  const UcxLock held = lock();
  auto peer = connect(held, blob);
  note_gpu(*peer, remote, on_gpu);
  return std::make_shared<UcxRoute>(held, shared_from_this(), std::move(peer), remote, on_gpu, metadata.name, pidfd);
}

std::shared_ptr<UcxPeer> UcxWorker::connect(const UcxLock& lock, const UcxBlob& blob) {
  if (closed_) throw Error(ErrorCode::kClosed, "the UCX worker was closed");
  auto peer = std::make_shared<UcxPeer>();
  peer->worker = this;
  peer->regions.reserve(blob.regions.size());
  const Bytes address = ucx_padded(blob.address);
  ucp_ep_params_t params{};
  params.field_mask =
      UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(address.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = on_endpoint_error;
  params.err_handler.arg = peer.get();
  peers_.push_back(peer);
  const ucs_status_t created = ucx_.ep_create(worker_, &params, &peer->endpoint);
  if (created != UCS_OK) {
    peer->endpoint = nullptr;
    peers_.pop_back();
    ucx_.require(created, "ucp_ep_create");
  }
  for (const UcxBlob::Region& region : blob.regions) {
    ucp_rkey_h key = nullptr;
    const ucs_status_t status = ucx_.ep_rkey_unpack(peer->endpoint, ucx_padded(region.key).data(), &key);
    if (status != UCS_OK) {
      shut(lock, *peer);
      drop(lock, peer);
      ucx_.require(status, "ucp_ep_rkey_unpack");
    }
    peer->regions.push_back({region.base, region.bytes, key});
  }
  return peer;
}

void UcxWorker::shut(const UcxLock&, UcxPeer& peer) noexcept {
  if (peer.endpoint == nullptr) return;
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  params.flags = UCP_EP_CLOSE_FLAG_FORCE;
  params.cb.send = on_endpoint_closed;
  params.user_data = &peer;
  const ucp_ep_h endpoint = peer.endpoint;
  peer.endpoint = nullptr;
  const ucs_status_ptr_t request = ucx_.ep_close_nbx(endpoint, &params);
  if (UCS_PTR_IS_PTR(request)) {
    ++peer.closing;
    context_->thread().kick(watch_);  // somebody must make it progress
  }
  note_completion();
}

void UcxWorker::destroy_keys(UcxPeer& peer) noexcept {
  for (const UcxPeer::Region& region : peer.regions) ucx_.rkey_destroy(region.key);
  peer.regions.clear();
}

// What UCX still knows of stays in peers_ until it has let go: see progress().
void UcxWorker::drop(const UcxLock& lock, const std::shared_ptr<UcxPeer>& peer) noexcept {
  shut(lock, *peer);
  if (worker_ == nullptr) return;  // close() has done the rest
  destroy_keys(*peer);
  if (peer->closing == 0) std::erase(peers_, peer);
}

void UcxWorker::enter(const UcxLock&) noexcept { ++writers_; }

void UcxWorker::leave(const UcxLock&) noexcept {
  if (--writers_ > 0) return;
  if (parked_) context_->thread().kick(watch_);
  parked_ = false;
  if (closed_) woken_.notify_all();
}

bool UcxWorker::progress(const UcxLock&) noexcept {
  if (worker_ == nullptr) return true;
  int round = 0;
  while (round < kProgressRounds && ucx_.worker_progress(worker_) != 0) ++round;
  const bool drained = round < kProgressRounds;
  if (completions_ == completions_told_) return drained;
  completions_told_ = completions_;
  // Peers that were dropped while UCX was closing their endpoint: this list is their last owner.
  std::erase_if(peers_, [](const std::shared_ptr<UcxPeer>& peer) {
    return peer.use_count() == 1 && peer->endpoint == nullptr && peer->closing == 0 && peer->regions.empty();
  });
  if (waiting_ > 0) woken_.notify_all();
  if (sleeping_) {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = write(wake_, &one, sizeof(one));
  }
  return drained;
}

bool UcxWorker::rest(UcxLock& lock, std::int64_t deadline_ns, bool drained, std::int64_t& spin_until) noexcept {
  const std::int64_t now = monotonic_ns();
  if (now >= deadline_ns) return false;
  if (spin_until == 0) spin_until = now + kSpinNs;
  if (!drained || now < spin_until) {
    lock.unlock();
    lock.lock();
  } else if (sleeping_) {
    ++waiting_;
    woken_.wait_until(lock, std::chrono::steady_clock::time_point(std::chrono::nanoseconds(deadline_ns)));
    --waiting_;
  } else {
    sleep_on_descriptor(lock, deadline_ns);
  }
  return true;
}

void UcxWorker::sleep_on_descriptor(UcxLock& lock, std::int64_t until_ns) noexcept {
  // What arrives from here on makes the descriptor readable. Busy: something has arrived already.
  if (worker_ != nullptr && ucx_.worker_arm(worker_) != UCS_OK) return;
  sleeping_ = true;
  lock.unlock();
  const std::int64_t left_ns = std::max<std::int64_t>(until_ns - monotonic_ns(), 0);
  const timespec left{left_ns / 1'000'000'000, left_ns % 1'000'000'000};
  pollfd watched[] = {{wake_, POLLIN, 0}, {descriptor_, POLLIN, 0}};
  ppoll(watched, 2, &left, nullptr);
  if ((watched[0].revents & POLLIN) != 0) {
    std::uint64_t count = 0;
    [[maybe_unused]] const auto got = read(wake_, &count, sizeof(count));
  }
  lock.lock();
  sleeping_ = false;
  if (waiting_ > 0) woken_.notify_all();  // one of them sleeps on the descriptor next
}

// In the context's thread.
void UcxWorker::serve() noexcept {
  const UcxGpuScope current(context_->gpu());
  const UcxLock held(lock_);
  if (closed_) return;
  if (writers_ > 0) {
    parked_ = true;
    return;
  }
  if (progress(held) && ucx_.worker_arm(worker_) == UCS_OK) {
    context_->thread().rearm(watch_);
  } else {
    context_->thread().kick(watch_);
  }
}

bool UcxWorker::close() noexcept {
  if (context_->forked()) return true;  // whatever writes, it is not this process
  const UcxGpuScope current(context_->gpu());
  {
    UcxLock held(lock_);
    const auto idle = [&] {
      return writers_ == 0 &&
             std::all_of(peers_.begin(), peers_.end(), [](const auto& peer) { return peer->closing == 0; });
    };
    closed_ = true;
    for (const auto& peer : peers_) shut(held, *peer);
    if (!wait(held, monotonic_ns() + kCloseNs, idle)) return false;
    if (worker_ == nullptr) return true;
  }
  context_->thread().remove(watch_);
  UcxLock held(lock_);
  if (worker_ == nullptr) return true;
  for (const auto& peer : peers_) destroy_keys(*peer);
  peers_.clear();
  // UCX 1.13 aborts when answers to peers that connect over tcp are still waiting to be sent.
  if (ucx_.minor < kMinorClosesClean) wait(held, monotonic_ns() + kOldCloseNs, [] { return false; });
  ucx_.worker_destroy(worker_);
  worker_ = nullptr;
  return true;
}

}  // namespace kvpool
