#include "kvpool/peers/route_maker.h"

#include <unistd.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "kvpool/base/error.h"
#include "kvpool/cuda/staging.h"
#include "kvpool/peers/gpu_staging_buffer.h"
#include "kvpool/routes/route_choice.h"

namespace kvpool {
namespace {

// What the link to a peer keeps: the grant of each transport, in their order.
struct Grants {
  std::vector<std::shared_ptr<Grant>> of;
};

std::shared_ptr<Grants> grants_of(const Link& link) { return std::static_pointer_cast<Grants>(link.attachment()); }

Grant* grant_at(const std::shared_ptr<Grants>& grants, std::size_t i) noexcept {
  return grants == nullptr || i >= grants->of.size() ? nullptr : grants->of[i].get();
}

bool names(const PeerMetadata& peer, const char* transport) {
  return std::ranges::find(peer.routes, transport) != peer.routes.end();
}

// Of the GPU itself, or of the process: no other transport would do better.
bool is_fatal(const Error& error) noexcept {
  return error.code() == ErrorCode::kDeviceLost || error.code() == ErrorCode::kState;
}

}  // namespace

RouteMaker::RouteMaker(const ServiceOptions& options, LocalMemory memory, std::uint64_t incarnation, Executor& executor,
                       RouteRun run, std::span<const TransportKind> kinds)
    : incarnation_(incarnation), copiers_(executor, options.worker_threads), memory_(std::move(memory)) {
  const std::vector<TransportKind> chosen = transports_named(kinds, options.routes, memory_.in_pieces());
  const bool elsewhere =
      std::ranges::all_of(memory_.arenas, [](const auto& arena) { return arena->segments().empty(); });
  if (elsewhere) {
    for (const TransportKind& kind : chosen) names_.emplace_back(kind.name);
    return;
  }
  if (auto gpu = memory_.gpu()) memory_.staging = std::make_shared<DeviceStaging>(std::move(gpu));
  add_transports(chosen, options, std::move(run));
}

void RouteMaker::add_transports(const std::vector<TransportKind>& kinds, const ServiceOptions& options, RouteRun run) {
  const TransportSetup setup{options.transports, incarnation_, memory_, copiers_.team(), std::move(run), notes_};
  std::optional<Error> left_out;
  for (const TransportKind& kind : kinds) {
    try {
      transports_.push_back({kind.name, kind.make(setup)});
      names_.emplace_back(kind.name);
    } catch (const Error& error) {
      if (!kind.by_default || is_fatal(error)) throw;
      // Peers come by the others.
      notes_.push_back(std::string("the route ") + kind.name + " is left out: " + error.what());
      left_out = error;
    }
  }
  if (transports_.empty() && left_out) throw Error(*left_out);
}

RouteMaker::~RouteMaker() { let_go(); }

void RouteMaker::let_go() noexcept {
  for (const Named& named : transports_) named.transport->let_go();
  LocalMemory memory;  // destroyed without the lock
  const std::lock_guard lock(mutex_);
  std::swap(memory, memory_);
}

LocalMemory RouteMaker::memory() const {
  const std::lock_guard lock(mutex_);
  if (memory_.arenas[Medium::kHbm] == nullptr) throw Error(ErrorCode::kClosed, "the pool is closed");
  return memory_;
}

Introduction RouteMaker::introduce() const {
  const LocalMemory memory = this->memory();
  Introduction introduction;
  PeerMetadata& metadata = introduction.metadata;
  metadata.routes = names_;
  metadata.pid = static_cast<std::uint64_t>(getpid());
  metadata.host = host_id();
  memory.describe(metadata);
  Offer offer{metadata};
  auto grants = std::make_shared<Grants>();
  for (const Named& named : transports_) grants->of.push_back(named.transport->offer(memory, offer));
  for (const Medium medium : kMedia) {
    if (offer.files[medium] < 0) continue;
    metadata.media[medium].mapped_bytes = memory.arena(medium)->mapped_bytes();
    introduction.descriptors.push_back(offer.files[medium]);
  }
  introduction.attachment = std::move(grants);
  return introduction;
}

std::unique_ptr<StagingBuffer> RouteMaker::staging_buffer(std::span<const Address> blocks, std::vector<iovec>& pieces,
                                                          std::uint64_t bytes) const {
  std::shared_ptr<DeviceStaging> staging;
  MediaSet on_gpu{};
  {
    const std::lock_guard lock(mutex_);
    if (memory_.arenas[Medium::kHbm] == nullptr) throw Error(ErrorCode::kClosed, "the pool is closed");
    staging = memory_.staging;
    on_gpu = memory_.on_gpu();
  }
  const MediaSet reach = media_set_of(blocks);
  const auto on_gpu_of = [&](Medium medium) { return reach[medium] && on_gpu[medium]; };
  if (std::ranges::none_of(kMedia, on_gpu_of)) return nullptr;
  return make_gpu_staging_buffer(std::move(staging), pieces, bytes);
}

Exposure RouteMaker::exposure(const PeerMetadata& peer, const std::shared_ptr<Link>& link) const {
  const PeerEnd end{peer, link, peer.host == host_id()};
  Exposure all;
  for (const Named& named : transports_) {
    if (!names(peer, named.name)) continue;
    Exposure one = named.transport->exposure(end);
    one.beyond_files = one.any() && !named.transport->writes_files_only();
    all.add(one);
  }
  return all;
}

bool RouteMaker::fence(const Link& link) noexcept {
  const auto grants = grants_of(link);
  bool fenced = true;
  for (std::size_t i = 0; grants != nullptr && i < grants->of.size(); ++i) {
    Grant* const grant = grants->of[i].get();
    if (grant != nullptr && !grant->fence()) fenced = false;
  }
  return fenced;
}

std::unique_ptr<Route> RouteMaker::reader(const std::shared_ptr<const MediaSpans>& from) {
  return make_reader(from, memory(), copiers_.team());
}

std::vector<std::shared_ptr<Route>> RouteMaker::make(const PeerMetadata& peer,
                                                     const std::shared_ptr<Link>& link) const {
  const LocalMemory memory = this->memory();
  const PeerEnd end{peer, link, peer.host == host_id()};
  const auto grants = grants_of(*link);
  std::vector<std::shared_ptr<Route>> routes;
  std::string why;
  for (std::size_t i = 0; i < transports_.size(); ++i) {
    const Named& named = transports_[i];
    if (!names(peer, named.name)) continue;
    try {
      named.transport->connect(memory, end, grant_at(grants, i), routes);
    } catch (const Error& error) {
      why += std::string(why.empty() ? "" : "; ") + named.name + ": " + error.what();
    }
  }
  if (!routes.empty()) return routes;
  throw Error(ErrorCode::kUnsupported, "there is no way to write into the memory of peer " + peer.name +
                                           (why.empty() ? ": the routes of both have none in common that works between "
                                                          "these processes"
                                                        : ": " + why));
}

}  // namespace kvpool
