#include "kvpool/pool/route_maker.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <unordered_map>
#include <utility>

#include "kvpool/base/error.h"
#include "kvpool/transport/cma_route.h"
#include "kvpool/transport/memory_route.h"
#include "kvpool/transport/peer_memory.h"
#include "kvpool/transport/sock_route.h"
#include "kvpool/transport/ucx_transport.h"

namespace kvpool {
namespace {

constexpr std::array kAllRoutes = {"loopback", "shm", "cma", "ucx", "sock"};
// Without being asked for: cma lets peers write anywhere in the process, and ucx costs a start-up of its own.
constexpr std::array kDefaultRoutes = {"loopback", "shm", "sock"};

std::vector<std::string> checked_names(const std::vector<std::string>& names) {
  if (names.empty()) return {kDefaultRoutes.begin(), kDefaultRoutes.end()};
  for (const std::string& name : names) {
    if (std::find(kAllRoutes.begin(), kAllRoutes.end(), name) != kAllRoutes.end()) continue;
    throw Error(ErrorCode::kArgument, "there is no route '" + name + "'; routes are loopback, shm, cma, ucx, sock");
  }
  return names;
}

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

struct Registry {
  std::mutex mutex;
  struct Entry {
    MediaSpans spans;
    std::shared_ptr<void> keepalive;
  };
  std::unordered_map<std::uint64_t, Entry> pools;
};

Registry& registry() {
  static auto* const instance = new Registry;  // never destroyed: threads may outlive static objects
  return *instance;
}

}  // namespace

void ProcessPools::add(std::uint64_t epoch, const MediaSpans& spans, std::shared_ptr<void> keepalive) {
  const std::lock_guard lock(registry().mutex);
  registry().pools.insert_or_assign(epoch, Registry::Entry{spans, std::move(keepalive)});
}

void ProcessPools::remove(std::uint64_t epoch) noexcept {
  const std::lock_guard lock(registry().mutex);
  registry().pools.erase(epoch);
}

std::shared_ptr<void> ProcessPools::find(std::uint64_t epoch, MediaSpans& spans) {
  const std::lock_guard lock(registry().mutex);
  const auto entry = registry().pools.find(epoch);
  if (entry == registry().pools.end()) return nullptr;
  spans = entry->second.spans;
  return entry->second.keepalive;
}

MediaSpans LocalMemory::spans() const {
  MediaSpans spans;
  for (std::size_t i = 0; i < spans.size(); ++i) spans[i] = {arenas[i]->blocks(), arenas[i]->segments()};
  return spans;
}

std::shared_ptr<void> LocalMemory::keepalive() const {
  return std::make_shared<std::array<std::shared_ptr<Arena>, kMediaCount>>(arenas);
}

RouteMaker::RouteMaker(const ServiceOptions& options, LocalMemory memory, std::uint64_t epoch)
    : names_(checked_names(options.routes)), epoch_(epoch), team_(options.worker_threads), memory_(std::move(memory)) {
  const bool elsewhere =
      std::ranges::all_of(memory_.arenas, [](const auto& arena) { return arena->segments().empty(); });
  if (elsewhere) return;
  if (offers("ucx")) ucx_ = UcxContext::make(options.ucx, memory_.spans(), memory_.keepalive());
  if (offers("cma")) static_cast<void>(allow_cma_writers());
  if (offers("loopback")) ProcessPools::add(epoch_, memory_.spans(), memory_.keepalive());
}

RouteMaker::~RouteMaker() { let_go(); }

void RouteMaker::let_go() noexcept {
  ProcessPools::remove(epoch_);
  std::shared_ptr<UcxContext> ucx;  // destroyed without the lock
  LocalMemory memory;
  const std::lock_guard lock(mutex_);
  ucx.swap(ucx_);
  std::swap(memory, memory_);
}

LocalMemory RouteMaker::memory() const {
  const std::lock_guard lock(mutex_);
  if (memory_.arenas[0] == nullptr) throw Error(ErrorCode::kClosed, "the pool is closed");
  return memory_;
}

bool RouteMaker::offers(const char* name) const { return contains(names_, name); }

std::shared_ptr<void> RouteMaker::introduce(PeerCard& card) const {
  card.routes = names_;
  card.pid = static_cast<std::uint64_t>(getpid());
  card.host = host_id();
  const LocalMemory memory = this->memory();
  const Layout& layout = memory.layout;
  card.block_tokens = layout.block_tokens;
  card.piece_bytes.assign(layout.piece_bytes.begin(), layout.piece_bytes.end());
  card.kv_heads = layout.kv_heads;
  card.head_dim = layout.head_dim;
  card.itemsize = layout.itemsize;
  for (const Medium medium : {Medium::kHbm, Medium::kDram}) {
    const Arena& arena = *memory.arena(medium);
    CardMedium& out = card.media[medium_index(medium)];
    out.blocks = arena.blocks();
    if (arena.blocks() == 0) continue;
    if (arena.memfd() >= 0 && offers("shm")) out.mapped_bytes = arena.mapped_bytes();
    for (const Segment& segment : arena.segments()) {
      out.segments.push_back({reinterpret_cast<std::uint64_t>(segment.base), segment.stride, segment.bytes});
    }
  }
  std::shared_ptr<UcxContext> ucx;
  {
    const std::lock_guard lock(mutex_);
    ucx = ucx_;
  }
  if (ucx == nullptr) return nullptr;
  // Each peer has a worker of its own, so that one can be fenced and the others not.
  std::shared_ptr<UcxWorker> worker = ucx->make_worker();
  card.ucx = worker->blob();
  return worker;
}

std::vector<int> RouteMaker::descriptors() const {
  const LocalMemory memory = this->memory();
  std::vector<int> descriptors;
  for (const Medium medium : {Medium::kHbm, Medium::kDram}) {
    const Arena& arena = *memory.arena(medium);
    if (arena.blocks() > 0 && arena.memfd() >= 0 && offers("shm")) descriptors.push_back(arena.memfd());
  }
  return descriptors;
}

RouteMaker::Exposure RouteMaker::exposure(const PeerCard& peer, const Link& link) const {
  const bool same_host = peer.host == host_id();
  const auto both = [&](const char* name) { return offers(name) && contains(peer.routes, name); };
  const bool local_link = link.pidfd() >= 0 || link.describe().starts_with("unix");
  Exposure exposure;
  exposure.by_ucx = both("ucx");
  // Between processes of a host UCX writes as cma does, too.
  exposure.by_address = same_host && (both("ucx") || both("cma"));
  exposure.by_process = (same_host && (both("ucx") || both("cma") || (both("shm") && local_link))) ||
                        (both("loopback") && link.process() == getpid());
  return exposure;
}

bool RouteMaker::fence(const Link& link) noexcept {
  const auto worker = std::static_pointer_cast<UcxWorker>(link.attachment());
  return worker == nullptr || worker->close();
}

std::shared_ptr<Route> RouteMaker::make_one(const std::string& name, const PeerCard& peer,
                                            const std::shared_ptr<Link>& link) {
  const bool same_host = peer.host == host_id();
  const LocalMemory memory = this->memory();
  if (name == "loopback") {
    MediaSpans spans;
    // By the kernel's word, not the card's: a process that names another pool's epoch would have its blocks written
    // there. Over TCP the kernel says nothing.
    const auto keep = link->process() == getpid() ? ProcessPools::find(peer.epoch, spans) : nullptr;
    if (keep == nullptr) return nullptr;
    const auto both =
        std::make_shared<std::pair<std::shared_ptr<void>, std::shared_ptr<void>>>(memory.keepalive(), keep);
    return make_loopback_route(memory.spans(), spans, both, team_);
  }
  if (name == "shm") {
    if (!same_host) return nullptr;
    MediaFiles files{-1, -1};
    std::size_t next = 0;
    for (std::size_t i = 0; i < files.size(); ++i) {
      if (peer.media[i].mapped_bytes > 0) files[i] = link->descriptor(next++);
    }
    // What a peer has adopted cannot be mapped: the route reaches the media that can.
    if (files == MediaFiles{-1, -1}) return nullptr;
    return make_shm_route(memory.spans(), memory.keepalive(), peer, files, team_);
  }
  if (name == "cma") {
    if (!same_host || link->pidfd() < 0) return nullptr;
    return make_cma_route(memory.spans(), memory.keepalive(), peer, static_cast<pid_t>(peer.pid), link->pidfd(), team_);
  }
  if (name == "ucx") {
    const auto worker = std::static_pointer_cast<UcxWorker>(link->attachment());
    return peer.ucx.empty() || worker == nullptr ? nullptr : worker->make_route(peer, link->pidfd());
  }
  return make_sock_route(memory.spans(), memory.keepalive(), link);
}

std::vector<std::shared_ptr<Route>> RouteMaker::make(const PeerCard& peer, const std::shared_ptr<Link>& link) {
  std::vector<std::shared_ptr<Route>> routes;
  std::string why;
  for (const std::string& name : names_) {
    if (!contains(peer.routes, name)) continue;
    try {
      if (auto route = make_one(name, peer, link)) routes.push_back(std::move(route));
    } catch (const Error& error) {
      why += std::string(why.empty() ? "" : "; ") + name + ": " + error.what();
    }
  }
  if (!routes.empty()) return routes;
  throw Error(ErrorCode::kUnsupported, "there is no way to write into the memory of peer " + peer.name +
                                           (why.empty() ? ": the routes of both have none in common that works between "
                                                          "these processes"
                                                        : ": " + why));
}

}  // namespace kvpool
