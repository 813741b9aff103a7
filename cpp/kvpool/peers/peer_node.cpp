#include "kvpool/peers/peer_node.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "kvpool/attend_gpu/gpu_attention.h"
#include "kvpool/base/clock.h"
#include "kvpool/base/fork_guard.h"
#include "kvpool/peers/service.h"
#include "kvpool/pool/pool.h"
#include "kvpool/sequences/attender.h"

namespace kvpool {
namespace {

// Null for a pool without blocks on a GPU that attention can read.
std::shared_ptr<GpuAttention> load_attention(Pool& pool, std::span<const AttentionCubin> cubins) {
  const PageFormat& format = pool.layout().format;
  if (!pool.on_device() || !format.known()) return nullptr;
  const std::shared_ptr<Arena> hbm = pool.arena(Medium::kHbm);
  if (hbm->blocks() == 0) return nullptr;
  return GpuAttention::load(hbm->context(), format.dtype, format.head_dim, cubins);
}

}  // namespace

PeerNode::PeerNode(std::shared_ptr<Pool> pool, MakeRanks make_ranks, std::int64_t timeout_ns, int attend_threads,
                   std::span<const AttentionCubin> attend_cubins)
    : pool_(std::move(pool)),
      attender_(std::make_unique<Attender>(pool_->executor(), attend_threads, load_attention(*pool_, attend_cubins))),
      make_ranks_(std::move(make_ranks)),
      timeout_ns_(timeout_ns),
      made_in_(fork_generation()) {
  pool_->observe(this);
}

PeerNode::~PeerNode() {
  if (made_in_ != fork_generation()) {
    static_cast<void>(service_.release());
    for (auto& service : dropped_) static_cast<void>(service.release());
    return;
  }
  pool_->observe(nullptr);
  on_pool_closing();
}

void PeerNode::close() noexcept { pool_->close(); }

void PeerNode::on_pool_closing() noexcept {
  attender_->stop();  // a thread that waits for attention may compute it, and is no thread of the pool
  const std::lock_guard lock(mutex_);
  closing_ = true;
  if (service_ != nullptr) service_->close();
}

void PeerNode::on_pool_failed(const Error& why) noexcept {
  if (Service* const open = service()) open->fail(why);
}

Service& PeerNode::prepare_service(const ServiceOptions& options) {
  pool_->guard();
  const std::lock_guard lock(mutex_);
  pool_->guard();
  if (closing_) throw Error(ErrorCode::kClosed, "the pool is closed");
  if (service_ != nullptr) throw Error(ErrorCode::kState, "the pool listens or is connected already");
  service_ = std::make_unique<Service>(*pool_, *attender_, options, make_ranks_);
  return *service_;
}

void PeerNode::publish_service() {
  pool_->guard();
  const std::lock_guard lock(mutex_);
  pool_->guard();
  if (service_ == nullptr) throw Error(ErrorCode::kState, "the pool has no service to publish");
  service_->keep_instance();
  published_.store(service_.get(), std::memory_order_release);
  // A failure from before this moment was told to nobody. The pool's lock orders the two: either it is seen here, or
  // on_pool_failed() sees the service.
  if (const std::optional<Error> why = pool_->failure()) service_->fail(*why);
}

Service& PeerNode::start_service(const ServiceOptions& options) {
  Service& service = prepare_service(options);
  publish_service();
  return service;
}

Service* PeerNode::prepared_service() {
  const std::lock_guard lock(mutex_);
  return service_.get();
}

void PeerNode::drop_service() {
  pool_->guard_process();
  const std::lock_guard lock(mutex_);
  if (service_ == nullptr) return;
  const bool published = service() != nullptr;
  if (published) dropped_.reserve(dropped_.size() + 1);
  published_.store(nullptr, std::memory_order_release);
  service_->close();
  if (published) dropped_.push_back(std::move(service_));  // some verb may be in it
  service_.reset();
  if (!published) pool_->forget_instance();
}

void PeerNode::free(const Address* addresses, std::size_t n, const GivenUp& given_up) {
  constexpr std::int64_t kDeadlineNs = 30'000'000'000;
  Service* const open = service();
  const auto is_own = [own = pool_->instance()](Address address) {
    return instance_of(address) == 0 || instance_of(address) == own;
  };
  if (open == nullptr || std::all_of(addresses, addresses + n, is_own)) return pool_->free(addresses, n);
  const std::vector<Address> own = pool_->check_free(addresses, n);
  // Once nothing is wrong, a peer that is gone or does not answer keeps nobody from freeing the rest.
  open->free(addresses, n, {monotonic_ns() + kDeadlineNs, given_up}, [&] { pool_->free(own.data(), own.size()); });
}

}  // namespace kvpool
