#include "kvpool/pool/service.h"

#include <unistd.h>

#include <algorithm>
#include <random>
#include <utility>

#include "kvpool/base/error.h"
#include "kvpool/pool/pool.h"
#include "kvpool/pool/service_impl.h"
#include "kvpool/transfer/outgoing.h"

namespace kvpool {
namespace {

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
constexpr std::uint64_t kInlineBytes = std::uint64_t{1} << 20;          // copied in the caller's thread
constexpr std::uint64_t kInlineSocketBytes = std::uint64_t{256} << 10;  // a socket may make its writer wait
constexpr std::int64_t kDrainNs = 2'000'000'000;
std::uint64_t random_bits() {
  std::random_device device;
  return (static_cast<std::uint64_t>(device()) << 32) | device();
}

std::string default_name(std::uint64_t epoch) {
  char host[128] = {};
  if (gethostname(host, sizeof(host) - 1) != 0) host[0] = '\0';
  constexpr std::uint64_t kShown = 0xffff;
  char tail[16];
  snprintf(tail, sizeof(tail), "%04llx", static_cast<unsigned long long>(epoch & kShown));
  return std::string(host[0] == '\0' ? "pool" : host) + "-" + std::to_string(getpid()) + "-" + tail;
}

}  // namespace

std::uint32_t ServiceImpl::random_instance() { return static_cast<std::uint32_t>(random_bits() % kInstanceMax) + 1; }

ServiceImpl::ServiceImpl(Pool& pool, const ServiceOptions& options)
    : pool_(pool),
      options_(options),
      epoch_(random_bits() | 1),
      limits_{options.reserve_ns, options.transfers_max, options.reserved_max},
      received_(options.received_max),
      blocks_(pool, received_),
      routes_(options, blocks_, epoch_),
      workers_(options.worker_threads),
      proposed_instance_(random_instance()) {
  if (options_.name.empty()) options_.name = default_name(epoch_);
  reactor_ = Reactor::make("kvpool-serve");
  ghosts_ = std::make_unique<Ghosts>(*reactor_, workers_);
  EndpointOptions endpoint;
  endpoint.secret = options_.secret;
  endpoint.trusted_network = options_.trusted_network;
  endpoint.lease_ns = options_.lease_ns;
  endpoint.door = options_.unix_door;
  endpoint_ = Endpoint::make(
      *reactor_, endpoint, [this] { return introduce(); },
      [this](const std::shared_ptr<Link>& link, const PeerCard& card, bool initiated_here) {
        return admit(link, card, initiated_here);
      });
  LocalServices::add(epoch_, this);
}

// --- verbs ---

std::unique_ptr<Received> ServiceImpl::receive(std::int64_t until_ns) {
  std::unique_ptr<Received> item = received_.pop(until_ns);
  if (item != nullptr && item->pin.node != nullptr) {
    item->pins = Pins(pool_.shared_from_this(), std::exchange(item->pin, {}));
  }
  return item;
}

void ServiceImpl::free(const Address* addresses, std::size_t n, std::int64_t deadline_ns) {
  std::vector<std::pair<SessionPointer, std::vector<Address>>> groups;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) throw Error(ErrorCode::kClosed, "the pool is closed");
    for (std::size_t i = 0; i < n; ++i) {
      const std::uint32_t instance = instance_of(addresses[i]);
      if (instance == 0 || instance == pool_.instance()) continue;
      auto group = std::find_if(groups.begin(), groups.end(),
                                [&](const auto& other) { return other.first->peer().instance == instance; });
      if (group == groups.end()) {
        const auto peer = std::find_if(peers_.begin(), peers_.end(), [&](const auto& entry) {
          return entry.second.session->peer().instance == instance;
        });
        if (peer == peers_.end()) {
          if (departed_.contains(instance)) continue;
          throw Error(ErrorCode::kNotOwner,
                      "address " + std::to_string(addresses[i]) + " (position " + std::to_string(i) +
                          ") belongs to instance " + std::to_string(instance) + ", which is no peer of this pool",
                      {{"address", static_cast<std::int64_t>(addresses[i])},
                       {"position", static_cast<std::int64_t>(i)},
                       {"instance", instance}});
        }
        group = groups.insert(groups.end(), {peer->second.session, {}});
      }
      group->second.push_back(addresses[i]);
    }
  }
  for (const auto& [session, group] : groups) session->give_back(group, deadline_ns);
}

std::vector<std::shared_ptr<Transfer>> ServiceImpl::transfer_batch(std::vector<TransferRequest>&& requests) {
  std::vector<std::shared_ptr<Outgoing>> prepared;
  prepared.reserve(requests.size());
  for (TransferRequest& request : requests) {
    const SessionPointer session = find(request.peer);
    prepared.push_back(session->prepare(std::move(request)));
  }
  std::vector<std::shared_ptr<Transfer>> handles(prepared.begin(), prepared.end());
  for (const auto& transfer : prepared) transfer->start_or_fail();
  return handles;
}

std::shared_ptr<Transfer> ServiceImpl::fetch(FetchRequest&& request) {
  const SessionPointer session = find(request.peer);
  const bool allocated = request.to.empty() && !request.from.empty();
  if (allocated) {
    request.to.resize(request.from.size());
    if (!pool_.try_alloc(request.to.size(), request.medium, request.to.data())) {
      if (!request.may_evict) pool_.throw_out_of_blocks(request.to.size(), request.medium);
      pool_.alloc_evicting(request.to.size(), request.medium, request.to.data());
    }
  }
  try {
    return session->fetch(request, /*frees_on_failure=*/allocated);
  } catch (...) {
    if (allocated) pool_.free(request.to.data(), request.to.size());
    throw;
  }
}

// --- threads ---

void ServiceImpl::carry_out(WriteJob& job) {
  const auto done = std::move(job.done);
  try {
    const WriteOutcome outcome = job.route->write(job.request);
    done(outcome, nullptr);
  } catch (const Error& error) {
    done({}, &error);
  } catch (const std::exception& failure) {
    const Error error(ErrorCode::kOutOfMemory, std::string("no memory to write with: ") + failure.what());
    done({}, &error);
  }
}

void ServiceImpl::write(WriteJob&& job) {
  const RouteTraits traits = job.route->traits();
  const std::uint64_t limit = traits.one_sided ? kInlineBytes : kInlineSocketBytes;
  if (traits.by_caller && job.bytes <= limit && !reactor_->in_thread()) return carry_out(job);
  const Priority priority = job.priority;
  const void* const peer = job.route.get();
  const auto shared = std::make_shared<WriteJob>(std::move(job));
  if (traits.waits) return strands_.run(peer, priority, [shared] { carry_out(*shared); });
  workers_.run(priority, [shared] { carry_out(*shared); });
}

void ServiceImpl::tick_by(std::int64_t at_ns) {
  std::int64_t scheduled = next_tick_.load(std::memory_order_relaxed);
  while (at_ns < scheduled) {
    if (!next_tick_.compare_exchange_weak(scheduled, at_ns, std::memory_order_relaxed)) continue;
    try {
      reactor_->at(at_ns, [this] { tick(); });
    } catch (...) {
      next_tick_.store(kNever, std::memory_order_relaxed);  // or no later call would ask for one
      throw;
    }
    return;
  }
}

void ServiceImpl::tick() {
  next_tick_.store(kNever, std::memory_order_relaxed);
  std::vector<SessionPointer> sessions;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    for (const auto& [name, peer] : peers_) sessions.push_back(peer.session);
  }
  const std::int64_t now = monotonic_ns();
  std::int64_t next = kNever;
  for (const SessionPointer& session : sessions) next = std::min(next, session->tick(now));
  if (next != kNever) tick_by(std::max(next, now + 1));
}

void ServiceImpl::close() noexcept {
  std::vector<Peer> peers;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    closed_ = true;
    for (auto& [name, peer] : peers_) peers.push_back(peer);
  }
  endpoint_->close();
  received_.close();
  const Error why(ErrorCode::kClosed, "the pool is closed");
  for (const Peer& peer : peers) peer.session->stop_writing(why);
  const std::int64_t until = monotonic_ns() + kDrainNs;
  for (const Peer& peer : peers) {
    while (peer.session->writes_under_way() > 0 && monotonic_ns() < until) usleep(200);
    if (peer.session->writes_under_way() == 0) peer.session->say_drained();
  }
  for (const Peer& peer : peers) {
    // What such a peer writes goes to addresses of this process, whose memory may soon be somebody else's.
    const std::vector<std::string> routes = peer.session->route_names();
    const bool by_address = std::any_of(routes.begin(), routes.end(),
                                        [](const std::string& route) { return route == "cma" || route == "ucx"; });
    if (by_address) static_cast<void>(peer.link->drive(until, [&] { return peer.session->peer_drained(); }));
    peer.link->close(why);
  }
  workers_.stop();
  strands_.stop();
  reactor_->stop();
  LocalServices::remove(epoch_);
  drop_received();
  ghosts_->clear();
  std::unordered_map<std::string, Peer> gone;
  const std::lock_guard lock(mutex_);
  gone.swap(peers_);
}

// What the application never asked for keeps nothing pinned.
void ServiceImpl::drop_received() noexcept {
  try {
    while (const auto item = received_.pop(0)) {
      if (item->pin.node != nullptr) pool_.unpin(&item->pin, 1);
    }
  } catch (const Error&) {  // closed, and empty
    return;
  }
}

std::unique_ptr<Service> Service::make(Pool& pool, const ServiceOptions& options) {
  return std::make_unique<ServiceImpl>(pool, options);
}

}  // namespace kvpool
