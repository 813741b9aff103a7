#include "kvpool/peers/service.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "kvpool/base/clock.h"
#include "kvpool/base/error.h"
#include "kvpool/base/failure.h"
#include "kvpool/cuda/order.h"
#include "kvpool/peers/incarnation.h"
#include "kvpool/peers/local_services.h"
#include "kvpool/pool/pool.h"
#include "kvpool/transfer/messages.h"
#include "kvpool/transfer/outgoing.h"
#include "kvpool/views/peer_views.h"

namespace kvpool {
namespace {

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
// What is written in the caller's thread. Waking a worker and being woken by it costs as much as copying a MiB or two;
// a network may make its writer wait, and a socket copies twice besides.
constexpr std::uint64_t kInlineBytes = std::uint64_t{4} << 20;
constexpr std::uint64_t kInlineNetworkBytes = std::uint64_t{1} << 20;
constexpr std::uint64_t kInlineSocketBytes = std::uint64_t{256} << 10;

std::uint64_t inline_bytes(const RouteTraits& traits) noexcept {
  if (!traits.one_sided) return kInlineSocketBytes;
  return traits.waits ? kInlineNetworkBytes : kInlineBytes;
}

std::string default_name(std::uint64_t incarnation) {
  char host[128] = {};
  if (gethostname(host, sizeof(host) - 1) != 0) host[0] = '\0';
  char tail[16];
  snprintf(tail, sizeof(tail), "%08llx",
           static_cast<unsigned long long>(incarnation >> 32));  // the lowest bit is always set
  return std::string(host[0] == '\0' ? "pool" : host) + "-" + std::to_string(getpid()) + "-" + tail;
}

ServiceOptions named(ServiceOptions options, std::uint64_t incarnation) {
  if (options.name.empty()) options.name = default_name(incarnation);
  return options;
}

EndpointOptions endpoint_options(const ServiceOptions& options) {
  EndpointOptions endpoint;
  endpoint.secret = options.secret;
  endpoint.trusted_network = options.trusted_network;
  endpoint.lease_ns = options.lease_ns;
  endpoint.prefer_unix_socket = options.prefer_unix_socket;
  return endpoint;
}

}  // namespace

Service::Service(Pool& pool, Attender& attender, const ServiceOptions& options, const MakeRanks& make_ranks)
    : pool_(pool),
      incarnation_(random_incarnation()),
      options_(named(options, incarnation_)),
      limits_{options.reserve_max_ns, options.transfers_max,  options.reserved_max,
              options.viewed_max,     options.measure_routes, options.measure_ns},
      received_(options.received_max),
      blocks_(pool, received_),
      routes_(options, LocalMemory{pool.layout(), pool.arenas(), nullptr, pool.places()}, incarnation_, pool.executor(),
              [this](const void* key, std::function<void()> work) {
                receives_.run(key, Priority::kDecode, std::move(work));
              }),
      writes_(pool.executor(), {options.worker_threads, options.worker_threads}),
      steps_(pool.executor()),
      waits_(pool.executor()),
      watches_(pool.executor(), WriterQuarantine::kWatchLimits),
      receives_(pool.executor()),
      lent_attends_(pool, attender, pool.executor(), options.attend_lent_max),
      reactor_(std::make_unique<Reactor>("kvpool-serve")),
      writer_quarantine_(*reactor_, watches_),
      table_(pool, events_, book_, options_.name, incarnation_, options.joins_cluster),
      parting_(pool, table_, writer_quarantine_, routes_, options_.name, incarnation_),
      admission_({pool, options_, incarnation_, routes_, writer_quarantine_, table_, parting_,
                  static_cast<SessionHost&>(*this), ranks_}) {
  endpoint_ = std::make_unique<Endpoint>(
      *reactor_, endpoint_options(options_), [this] { return admission_.introduce(); },
      [this](const std::shared_ptr<Link>& link, const PeerMetadata& metadata, bool initiated_here) {
        return admission_.admit(link, metadata, initiated_here);
      });
  ranks_ = make_ranks({pool_, options_.name, incarnation_, routes_, writer_quarantine_, watches_, *endpoint_,
                       [this](const Error& why) { parting_.on_rank_lost(why); }});
  caller_ = std::make_unique<PeerCaller>(pool_, table_, book_, *endpoint_, *ranks_, incarnation_);
  LocalServices::add(incarnation_, &parting_);
}

// --- verbs ---

std::string Service::listen(const std::string& address) {
  pool_.guard();
  table_.begin_listen();
  std::string bound;
  const auto failure = failure_of([&] { bound = endpoint_->listen(address); });
  table_.end_listen(!failure);
  if (failure) throw Error(*failure);
  return bound;
}

std::vector<Address> Service::alloc(const std::string& peer, std::size_t n, MediumChoice medium, bool may_evict,
                                    const Waiting& waiting) {
  return caller_->reach(peer, waiting.until_ns, waiting.given_up)->borrow(n, medium, may_evict, waiting);
}

std::shared_ptr<Transfer> Service::transfer(TransferRequest&& request, const GivenUp& given_up) {
  const auto session = caller_->reach(request.peer, request.deadline_ns, given_up);
  return session->transfer(std::move(request));
}

void Service::set_members(std::vector<ClusterMember> members) {
  for (const std::uint64_t incarnation : book_.set(std::move(members))) {
    parting_.part_from(incarnation, Error(ErrorCode::kPeerLost, "a newer process has come under its name"));
  }
}

void Service::expel(std::uint64_t incarnation, const std::string& why) {
  book_.expel(incarnation, why);
  parting_.part_from(incarnation, Error(ErrorCode::kPeerLost, why));
}

std::unique_ptr<Received> Service::receive(std::int64_t until_ns) {
  std::unique_ptr<Received> item =
      received_.pop(until_ns, [this](const std::string& peer) { return table_.link_to(peer); });
  if (item != nullptr && item->pin.node != nullptr) {
    item->pins = Pins(pool_.shared_from_this(), std::exchange(item->pin, {}));
  }
  return item;
}

// No group is larger than what one message takes. Those of peers that are gone are left out: what they had lent is gone
// with them. Throws kNotOwner, kClosed.
std::vector<Service::LentGroup> Service::group_lent(const Address* addresses, std::size_t n) const {
  std::vector<LentGroup> groups;
  if (table_.closed()) throw Error(ErrorCode::kClosed, "the pool is closed");
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t instance = instance_of(addresses[i]);
    if (instance == 0 || instance == pool_.instance()) continue;
    auto group = std::find_if(groups.begin(), groups.end(), [&](const auto& other) {
      return other.session->peer().instance == instance && other.addresses.size() < kAddressesMax;
    });
    if (group == groups.end()) {
      const auto lender = table_.lender(instance);
      if (!lender) {
        throw Error(ErrorCode::kNotOwner,
                    "address " + std::to_string(addresses[i]) + " (position " + std::to_string(i) +
                        ") belongs to instance " + std::to_string(instance) + ", which is no peer of this pool",
                    {{"address", static_cast<std::int64_t>(addresses[i])},
                     {"position", static_cast<std::int64_t>(i)},
                     {"instance", instance}});
      }
      if (*lender == nullptr) continue;
      group = groups.insert(groups.end(), {*lender, {}, {}});
    }
    group->addresses.push_back(addresses[i]);
    group->positions.push_back(i);
  }
  return groups;
}

void Service::free(const Address* addresses, std::size_t n, const Waiting& waiting,
                   const std::function<void()>& free_own) {
  const std::vector<LentGroup> groups = group_lent(addresses, n);
  std::size_t marked = 0;
  try {
    for (; marked < groups.size(); ++marked) {
      groups[marked].session->borrowed().begin_write(groups[marked].addresses, groups[marked].positions);
    }
    if (free_own) free_own();
  } catch (...) {
    while (marked > 0) {
      const LentGroup& group = groups[--marked];
      group.session->unmark(group.addresses);
    }
    throw;
  }
  std::optional<Error> first;
  for (const LentGroup& group : groups) {
    const auto failure = failure_of([&] { group.session->give_back_marked(group.addresses, waiting); });
    if (failure && !first) first = failure;
  }
  if (first) throw Error(*first);
}

std::vector<std::shared_ptr<Transfer>> Service::transfer_batch(std::vector<TransferRequest>&& requests,
                                                               const GivenUp& given_up) {
  std::vector<std::shared_ptr<Session>> sessions;  // first all of them: what is prepared holds blocks
  sessions.reserve(requests.size());
  for (const TransferRequest& request : requests) {
    sessions.push_back(caller_->reach(request.peer, request.deadline_ns, given_up));
  }
  std::vector<std::shared_ptr<Outgoing>> prepared;
  prepared.reserve(requests.size());
  for (std::size_t i = 0; i < requests.size(); ++i) prepared.push_back(sessions[i]->prepare(std::move(requests[i])));
  std::vector<std::shared_ptr<Transfer>> handles(prepared.begin(), prepared.end());
  for (const auto& transfer : prepared) transfer->start_or_fail();
  return handles;
}

// --- threads ---

// With a GPU goes the content of every block on it.
void Service::watch_device(WriteJob& job) {
  if (!pool_.on_device()) return;
  job.done = [this, done = std::move(job.done)](const WriteOutcome& outcome, const Error* error) {
    if (error != nullptr && error->code() == ErrorCode::kDeviceLost) pool_.fail(*error);
    done(outcome, error);
  };
}

void Service::write_here(WriteJob&& job) {
  watch_device(job);
  carry_out(job);
}

void Service::write(WriteJob&& job) {
  watch_device(job);
  const RouteTraits traits = job.route->traits();
  const bool may_begin = job.request.after == nullptr || job.request.after->ended();
  if (traits.by_caller && may_begin && job.bytes <= inline_bytes(traits) && !reactor_->in_thread() &&
      !job.route->wants_other_thread()) {
    return carry_out(job);
  }
  const Priority priority = job.priority;
  const std::uint64_t peer = job.peer;
  const void* const route = job.route.get();
  const auto shared = std::make_shared<WriteJob>(std::move(job));
  if (traits.waits) return waits_.run(route, priority, [shared] { carry_out(*shared); });
  writes_.run(peer, priority, [shared] { carry_out(*shared); });
}

std::shared_ptr<PeerReads> Service::make_reads(const PeerMetadata& peer, bool by_mapping) {
  ViewLimits limits;
  limits.blocks_max = options_.viewed_max;
  return std::make_shared<PeerViews>(pool_, lent_attends_, peer.incarnation, by_mapping, limits);
}

void Service::tick_by(std::int64_t at_ns) {
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

void Service::tick() {
  next_tick_.store(kNever, std::memory_order_relaxed);
  if (table_.closed()) return;
  const std::int64_t now = monotonic_ns();
  std::int64_t next = kNever;
  for (const PeerTable::Peer& peer : table_.all()) next = std::min(next, peer.session->tick(now));
  if (next != kNever) tick_by(std::max(next, now + 1));
}

}  // namespace kvpool
