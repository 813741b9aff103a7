#include "kvpool/peers/route_maker.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <unordered_map>
#include <utility>

#include "kvpool/arena/device_arena.h"
#include "kvpool/base/error.h"
#include "kvpool/cuda/ipc_memory.h"
#include "kvpool/cuda/staging.h"
#include "kvpool/peers/gpu_staging_buffer.h"
#include "kvpool/routes/cuda_ipc/cuda_route.h"
#include "kvpool/routes/host/cma_route.h"
#include "kvpool/routes/host/memory_route.h"
#include "kvpool/routes/nccl/nccl_route.h"
#include "kvpool/routes/peer_memory.h"
#include "kvpool/routes/route_choice.h"
#include "kvpool/routes/sock/sock_route.h"
#include "kvpool/routes/ucx/ucx_transport.h"

namespace kvpool {
namespace {

constexpr std::array kAllRoutes = {"loopback", "shm", "cuda_ipc", "cma", "ucx", "nccl", "sock"};
// Without being asked for: cma lets peers write anywhere in the process, ucx and nccl cost a start-up of their own.
constexpr std::array kDefaultRoutes = {"loopback", "shm", "cuda_ipc", "sock"};

std::vector<std::string> checked_names(const std::vector<std::string>& names) {
  if (names.empty()) return {kDefaultRoutes.begin(), kDefaultRoutes.end()};
  for (const std::string& name : names) {
    if (std::find(kAllRoutes.begin(), kAllRoutes.end(), name) != kAllRoutes.end()) continue;
    throw Error(ErrorCode::kArgument,
                "there is no route '" + name + "'; routes are loopback, shm, cuda_ipc, cma, ucx, nccl, sock");
  }
  return names;
}

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool has_blocks(const MediaSpans& spans) noexcept {
  return std::ranges::any_of(spans, [](const MediumSpan& span) { return span.blocks > 0; });
}

// The descriptors that came with the peer's metadata, by medium.
MediaFiles files_of(const PeerMetadata& peer, const Link& link) {
  MediaFiles files = kNoFiles;
  std::size_t next = 0;
  for (std::size_t i = 0; i < files.size(); ++i) {
    if (peer.media[i].mapped_bytes > 0) files[i] = link.descriptor(next++);
  }
  return files;
}

UcxGpuMemory gpu_memory_of(const Arena& arena) {
  if (const auto* owned = dynamic_cast<const DeviceArena*>(&arena); owned != nullptr && owned->memory() != nullptr) {
    return owned->memory()->kind() == DeviceMemoryKind::kVirtual ? UcxGpuMemory::kVirtual : UcxGpuMemory::kPlain;
  }
  const CurrentContext current(*arena.context());
  for (const Segment& segment : arena.segments()) {
    int has_handle = 0;
    const auto at = static_cast<CuPointer>(reinterpret_cast<std::uintptr_t>(segment.base));
    const CuResult asked = arena.context()->driver().pointer_get_attribute(&has_handle, kCuPointerLegacyIpcCapable, at);
    if (!current || asked != kCudaSuccess || has_handle == 0) return UcxGpuMemory::kUnknown;
  }
  return UcxGpuMemory::kTensors;
}

struct Registry {
  std::mutex mutex;
  std::unordered_map<std::uint64_t, LocalMemory> pools;
};

Registry& registry() {
  static auto* const instance = new Registry;  // never destroyed: threads may outlive static objects
  return *instance;
}

// Whoever made the pool has measured them, if they could be.
CopyBounds bounds_of(const CudaContext& gpu) { return known_copy_bounds(gpu.ordinal()).value_or(CopyBounds{}); }

}  // namespace

void ProcessPools::add(std::uint64_t epoch, const LocalMemory& memory) {
  const std::lock_guard lock(registry().mutex);
  registry().pools.insert_or_assign(epoch, memory);
}

void ProcessPools::remove(std::uint64_t epoch) noexcept {
  std::unordered_map<std::uint64_t, LocalMemory>::node_type gone;  // its memory goes without the lock
  const std::lock_guard lock(registry().mutex);
  gone = registry().pools.extract(epoch);
}

std::optional<LocalMemory> ProcessPools::find(std::uint64_t epoch) {
  const std::lock_guard lock(registry().mutex);
  const auto entry = registry().pools.find(epoch);
  if (entry == registry().pools.end()) return std::nullopt;
  return entry->second;
}

MediaSpans LocalMemory::spans() const {
  MediaSpans spans;
  for (std::size_t i = 0; i < spans.size(); ++i) spans[i] = {arenas[i]->blocks(), arenas[i]->segments()};
  return spans;
}

MediaSpans LocalMemory::host_spans() const {
  MediaSpans spans = this->spans();
  for (std::size_t i = 0; i < spans.size(); ++i) {
    if (arenas[i]->on_device()) spans[i] = {};
  }
  return spans;
}

MediaSpans LocalMemory::gpu_spans(const CudaContext& gpu) const {
  MediaSpans spans = this->spans();
  for (std::size_t i = 0; i < spans.size(); ++i) {
    const Arena& arena = *arenas[i];
    bool reached = arena.pinned();
    if (arena.on_device()) {
      // Owned memory was opened to the other GPUs that reach it.
      const auto* owned = dynamic_cast<const DeviceArena*>(&arena);
      reached = arena.context()->ordinal() == gpu.ordinal() ||
                (owned != nullptr && owned->memory() != nullptr &&
                 std::ranges::find(owned->memory()->peers(), gpu.ordinal()) != owned->memory()->peers().end());
    }
    if (!reached) spans[i] = {};
  }
  return spans;
}

MediaSet LocalMemory::on_gpu() const noexcept {
  MediaSet set{};
  for (const Medium medium : kMedia) set[medium] = arena(medium)->on_device();
  return set;
}

std::shared_ptr<const CudaContext> LocalMemory::gpu() const noexcept {
  for (const auto& arena : arenas) {
    if (arena->on_device() && arena->blocks() > 0) return arena->context();
  }
  return nullptr;
}

std::shared_ptr<void> LocalMemory::keepalive() const {
  return std::make_shared<MediumMap<std::shared_ptr<Arena>>>(arenas);
}

RouteMaker::RouteMaker(const ServiceOptions& options, LocalMemory memory, std::uint64_t epoch)
    : names_(checked_names(options.routes)),
      epoch_(epoch),
      team_(options.worker_threads),
      nccl_limits_(options.nccl_limits),
      memory_(std::move(memory)) {
  const bool elsewhere =
      std::ranges::all_of(memory_.arenas, [](const auto& arena) { return arena->segments().empty(); });
  if (elsewhere) return;
  prepare_gpu();
  if (offers("nccl")) {
    if (!memory_.arena(Medium::kHbm)->on_device()) {
      throw Error(ErrorCode::kUnsupported, "the route nccl is for HBM on a GPU, and the HBM here is not on one");
    }
    nccl_ = &load_nccl(options.nccl);
  }
  if (offers("ucx")) prepare_ucx(options.ucx);
  if (offers("cma")) static_cast<void>(allow_cma_writers());
  if (offers("loopback")) ProcessPools::add(epoch_, memory_);
}

// What is on a GPU goes to peers by its own routes, or by way of buffers.
void RouteMaker::prepare_gpu() {
  const auto gpu = memory_.gpu();
  if (gpu == nullptr) return;
  staging_ = std::make_shared<DeviceStaging>(gpu);
  if (!offers("cuda_ipc")) return;
  try {
    export_gpu_memory(*gpu);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kDeviceLost || error.code() == ErrorCode::kState) throw;
    // Peers see no memory to map, and come by the other routes.
    notes_.push_back(std::string("the route cuda_ipc is left out: ") + error.what());
    for (std::size_t i = 0; i < exported_.size(); ++i) {
      exported_[i] = Descriptor();
      given_[i].clear();
    }
    std::erase(names_, "cuda_ipc");
    if (names_.empty()) throw;
  }
}

void RouteMaker::export_gpu_memory(const CudaContext& gpu) {
  for (std::size_t i = 0; i < exported_.size(); ++i) {
    const Arena& arena = *memory_.arenas[i];
    if (!arena.on_device() || arena.blocks() == 0) continue;
    const auto* owned = dynamic_cast<const DeviceArena*>(&arena);
    if (owned != nullptr && owned->memory()->kind() == DeviceMemoryKind::kVirtual) {
      const int fd = owned->memory()->export_descriptor();
      exported_[i] = Descriptor::open([fd] { return fd; });
      continue;
    }
    // Plain memory, and an engine's. What has no handle goes by sock.
    std::vector<std::span<const std::byte>> ranges;
    for (const Segment& segment : arena.segments()) {
      ranges.emplace_back(segment.base, (arena.blocks() - 1) * segment.stride + segment.bytes);
    }
    for (const IpcAllocation& allocation : ipc_allocations(gpu, ranges)) {
      MetadataAllocation& given = given_[i].emplace_back(MetadataAllocation{allocation.base, allocation.bytes, {}});
      std::memcpy(given.handle, &allocation.handle, sizeof(given.handle));
    }
  }
}

// UCX takes the host's memory, and a GPU's where it says that it can: other media go by other routes.
void RouteMaker::prepare_ucx(const std::string& where) {
  UcxLocal local;
  local.spans = memory_.spans();
  for (std::size_t i = 0; i < local.on_gpu.size(); ++i) {
    if (!memory_.arenas[i]->on_device() || memory_.arenas[i]->blocks() == 0) continue;
    local.on_gpu[i] = gpu_memory_of(*memory_.arenas[i]);
    local.gpu = memory_.arenas[i]->context();
  }
  ucx_ = UcxContext::make(where, local, memory_.keepalive());
  bool takes_any = false;
  for (std::size_t i = 0; i < local.on_gpu.size(); ++i) {
    const std::string& why = ucx_->refused()[i];
    takes_any = takes_any || (local.spans[i].blocks > 0 && why.empty());
    if (why.empty()) continue;
    notes_.push_back(std::string("the route ucx leaves out ") + medium_name(kMedia[i]) + ": " + why);
  }
  ucx_gives_handles_ = ucx_->gives_handles();
  // UCX hands over virtual memory by a descriptor that the peer takes out of this process (pidfd_getfd), and a kernel
  // with Yama allows that to tracers alone. Without, UCX goes the long way, by the host, and says nothing.
  const bool has_virtual = std::ranges::find(local.on_gpu, UcxGpuMemory::kVirtual) != local.on_gpu.end();
  if (has_virtual && !allow_cma_writers()) {
    notes_.push_back(
        "the route ucx may be slow to memory of the GPU: peers may not take its descriptors (prctl PR_SET_PTRACER "
        "failed); device_memory=\"plain\" needs no such right");
  }
  if (takes_any || notes_.empty()) return;
  ucx_.reset();
  throw Error(
      ErrorCode::kUnsupported,
      notes_.front() + "; there is no other memory: leave ucx out of routes, loopback, cuda_ipc and sock reach it");
}

// Handles of this process's memory: who has opened them must have closed them before it is freed.
bool RouteMaker::gives_handles() const noexcept {
  return std::ranges::any_of(given_, [](const auto& allocations) { return !allocations.empty(); });
}

RouteMaker::~RouteMaker() { let_go(); }

void RouteMaker::let_go() noexcept {
  ProcessPools::remove(epoch_);
  std::shared_ptr<UcxContext> ucx;  // destroyed without the lock
  std::shared_ptr<DeviceStaging> staging;
  MediumMap<Descriptor> exported;
  LocalMemory memory;
  const std::lock_guard lock(mutex_);
  ucx.swap(ucx_);
  staging.swap(staging_);
  exported.swap(exported_);
  std::swap(memory, memory_);
}

LocalMemory RouteMaker::memory() const {
  const std::lock_guard lock(mutex_);
  if (memory_.arenas[Medium::kHbm] == nullptr) throw Error(ErrorCode::kClosed, "the pool is closed");
  return memory_;
}

bool RouteMaker::offers(const char* name) const { return contains(names_, name); }

std::shared_ptr<void> RouteMaker::introduce(PeerMetadata& metadata) const {
  metadata.routes = names_;
  metadata.pid = static_cast<std::uint64_t>(getpid());
  metadata.host = host_id();
  const LocalMemory memory = this->memory();
  const Layout& layout = memory.layout;
  metadata.block_tokens = layout.block_tokens;
  metadata.piece_bytes.assign(layout.piece_bytes.begin(), layout.piece_bytes.end());
  metadata.format = layout.format;
  for (const Medium medium : kMedia) {
    const Arena& arena = *memory.arena(medium);
    MetadataMedium& out = metadata.media[medium];
    out.blocks = arena.blocks();
    if (arena.blocks() == 0) continue;
    if (arena.on_device()) out.kind = MemoryKind::kGpu;
    if (descriptor_of(medium, arena) >= 0) out.mapped_bytes = arena.mapped_bytes();
    out.allocations = given_[medium];
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
  metadata.ucx = worker->blob();
  return worker;
}

std::vector<int> RouteMaker::descriptors() const {
  const LocalMemory memory = this->memory();
  std::vector<int> descriptors;
  for (const Medium medium : kMedia) {
    const Arena& arena = *memory.arena(medium);
    const int descriptor = arena.blocks() > 0 ? descriptor_of(medium, arena) : -1;
    if (descriptor >= 0) descriptors.push_back(descriptor);
  }
  return descriptors;
}

int RouteMaker::descriptor_of(Medium medium, const Arena& arena) const {
  if (!arena.on_device()) return offers("shm") || offers("cuda_ipc") ? arena.memfd() : -1;
  const std::lock_guard lock(mutex_);
  return exported_[medium].get();
}

std::unique_ptr<StagingBuffer> RouteMaker::staging_buffer(std::span<const Address> blocks, std::vector<iovec>& pieces,
                                                          std::uint64_t bytes) const {
  std::shared_ptr<DeviceStaging> staging;
  MediaSet on_gpu{};
  {
    const std::lock_guard lock(mutex_);
    if (memory_.arenas[Medium::kHbm] == nullptr) throw Error(ErrorCode::kClosed, "the pool is closed");
    staging = staging_;
    on_gpu = memory_.on_gpu();
  }
  const MediaSet reach = media_set_of(blocks);
  const auto on_gpu_of = [&](Medium medium) { return reach[medium] && on_gpu[medium]; };
  if (std::ranges::none_of(kMedia, on_gpu_of)) return nullptr;
  return make_gpu_staging_buffer(std::move(staging), pieces, bytes);
}

RouteMaker::Exposure RouteMaker::exposure(const PeerMetadata& peer, const Link& link) const {
  const bool same_host = peer.host == host_id();
  const auto both = [&](const char* name) { return offers(name) && contains(peer.routes, name); };
  const bool local_link = link.pidfd() >= 0 || link.describe().starts_with("unix");
  Exposure exposure;
  exposure.by_ucx = both("ucx");
  // Between processes of a host UCX writes as cma does, too.
  exposure.by_address = same_host && (both("ucx") || both("cma"));
  const auto has_gpu =
      std::ranges::any_of(peer.media, [](const MetadataMedium& medium) { return medium.kind == MemoryKind::kGpu; });
  const bool loopback = both("loopback") && link.process() == getpid();
  const bool by_ipc = has_gpu && same_host && local_link && both("cuda_ipc");
  // UCX opens handles for a peer without blocks on a GPU, too; those of its own process it does not.
  const bool here = link.process() > 0 ? link.process() == getpid() : peer.pid == static_cast<std::uint64_t>(getpid());
  exposure.until_exit = same_host && !here && both("ucx") && ucx_gives_handles_;
  exposure.by_gpu = by_ipc || exposure.until_exit || (has_gpu && ((same_host && both("ucx")) || loopback));
  exposure.by_handle = (by_ipc && gives_handles()) || exposure.until_exit;
  exposure.by_process =
      exposure.by_gpu || (same_host && (both("ucx") || both("cma") || (both("shm") && local_link))) || loopback;
  return exposure;
}

bool RouteMaker::fence(const Link& link) noexcept {
  const auto worker = std::static_pointer_cast<UcxWorker>(link.attachment());
  return worker == nullptr || worker->close();
}

std::shared_ptr<Route> RouteMaker::make_one(const std::string& name, const PeerMetadata& peer,
                                            const std::shared_ptr<Link>& link) {
  const bool same_host = peer.host == host_id();
  const LocalMemory memory = this->memory();
  if (name == "loopback") {
    // By the kernel's word, not the metadata's: a process that names another pool's epoch would have its blocks written
    // there. Over TCP the kernel says nothing.
    const auto found = link->process() == getpid() ? ProcessPools::find(peer.epoch) : std::nullopt;
    if (!found || !has_blocks(found->host_spans()) || !has_blocks(memory.host_spans())) return nullptr;
    const auto both = std::make_shared<std::pair<std::shared_ptr<void>, std::shared_ptr<void>>>(memory.keepalive(),
                                                                                                found->keepalive());
    return make_loopback_route(memory.host_spans(), found->host_spans(), both, team_);
  }
  if (name == "shm") {
    if (!same_host || !has_blocks(memory.host_spans())) return nullptr;
    MediaFiles files = files_of(peer, *link);
    for (std::size_t i = 0; i < files.size(); ++i) {
      if (peer.media[i].kind != MemoryKind::kHost) files[i] = -1;
    }
    // What a peer has adopted cannot be mapped: the route reaches the media that can.
    if (files == kNoFiles) return nullptr;
    return make_shm_route(memory.host_spans(), memory.keepalive(), peer, files, team_);
  }
  if (name == "cuda_ipc") return same_host ? make_cuda_ipc(peer, *link) : nullptr;
  if (name == "cma") {
    if (!same_host || link->pidfd() < 0 || !has_blocks(memory.host_spans())) return nullptr;
    return make_cma_route(memory.host_spans(), memory.keepalive(), peer, static_cast<pid_t>(peer.pid), link->pidfd(),
                          team_);
  }
  if (name == "ucx") {
    const auto worker = std::static_pointer_cast<UcxWorker>(link->attachment());
    return peer.ucx.empty() || worker == nullptr ? nullptr : worker->make_route(peer, link->pidfd());
  }
  if (name == "nccl") return run_ ? make_nccl(memory, link) : nullptr;
  std::shared_ptr<DeviceStaging> staging;
  {
    const std::lock_guard lock(mutex_);
    staging = staging_;
  }
  return make_sock_route(memory.spans(), memory.keepalive(), link, std::move(staging), memory.on_gpu());
}

std::shared_ptr<Route> RouteMaker::make_cuda_ipc(const PeerMetadata& peer, const Link& link) {
  const LocalMemory memory = this->memory();
  const auto gpu = memory.gpu();
  const MediaFiles files = files_of(peer, link);
  const bool opens_handles = has_handles(peer) && link.process() != getpid();
  if (gpu == nullptr || (files == kNoFiles && !opens_handles)) return nullptr;
  return make_cuda_ipc_route(
      {gpu, kernels_for(*gpu), bounds_of(*gpu), memory.gpu_spans(*gpu), memory.on_gpu(), memory.keepalive()}, peer,
      files, opens_handles);
}

std::shared_ptr<Route> RouteMaker::make_gpu_loopback(const PeerMetadata& peer, const Link& link) {
  const LocalMemory memory = this->memory();
  const auto gpu = memory.gpu();
  const auto found = gpu != nullptr && link.process() == getpid() ? ProcessPools::find(peer.epoch) : std::nullopt;
  if (!found || !has_blocks(found->gpu_spans(*gpu))) return nullptr;
  return make_cuda_loopback_route(
      {gpu, kernels_for(*gpu), bounds_of(*gpu), memory.gpu_spans(*gpu), memory.on_gpu(), memory.keepalive()},
      {found->gpu_spans(*gpu), found->on_gpu(), found->keepalive()});
}

// A peer that names the route has HBM on a GPU, too: else it could not.
std::shared_ptr<Route> RouteMaker::make_nccl(const LocalMemory& memory, const std::shared_ptr<Link>& link) const {
  const Arena& hbm = *memory.arena(Medium::kHbm);
  const Arena& dram = *memory.arena(Medium::kDram);
  NcclMemory own;
  own.library = nccl_;
  own.context = hbm.context();
  own.local = memory.spans();
  own.keepalive = memory.keepalive();
  own.limits = nccl_limits_;
  if (!dram.pinned()) own.local[Medium::kDram] = {};
  own.kernels = kernels_for(*own.context);
  own.bounds = bounds_of(*own.context);
  return make_nccl_route(own, link, run_);
}

std::vector<std::shared_ptr<Route>> RouteMaker::make(const PeerMetadata& peer, const std::shared_ptr<Link>& link) {
  std::vector<std::shared_ptr<Route>> routes;
  std::string why;
  for (const std::string& name : names_) {
    if (!contains(peer.routes, name)) continue;
    try {
      if (auto route = make_one(name, peer, link)) routes.push_back(std::move(route));
      if (name != "loopback") continue;
      if (auto route = make_gpu_loopback(peer, *link)) routes.push_back(std::move(route));
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
