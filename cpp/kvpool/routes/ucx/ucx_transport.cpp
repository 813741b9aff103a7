#include "kvpool/routes/ucx/ucx_transport.h"

#include <unistd.h>

#include <mutex>
#include <utility>

#include "kvpool/arena/device_memory.h"
#include "kvpool/base/error.h"
#include "kvpool/cuda/context.h"
#include "kvpool/routes/tracers.h"
#include "kvpool/routes/ucx/ucx_context.h"
#include "kvpool/routes/ucx/ucx_devices.h"
#include "kvpool/routes/ucx/ucx_route.h"
#include "kvpool/routes/ucx/ucx_worker.h"

namespace kvpool {
namespace {

// Each peer has a worker, so that one can be fenced and the others not.
class UcxGrant final : public Grant {
 public:
  explicit UcxGrant(std::shared_ptr<UcxWorker> worker) : worker_(std::move(worker)) {}
  bool fence() noexcept override { return worker_->close(); }
  UcxWorker& worker() const noexcept { return *worker_; }

 private:
  const std::shared_ptr<UcxWorker> worker_;
};

UcxGpuMemory gpu_memory_of(const Arena& arena) {
  if (const DeviceMemory* const owned = arena.device_memory()) {
    return owned->kind() == DeviceMemoryKind::kVirtual ? UcxGpuMemory::kVirtual : UcxGpuMemory::kPlain;
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

UcxLocal offered_to_ucx(const LocalMemory& memory) {
  UcxLocal local;
  local.spans = memory.spans();
  for (const Medium medium : kMedia) {
    const Arena& arena = *memory.arena(medium);
    if (!arena.on_device() || arena.blocks() == 0) continue;
    local.on_gpu[medium] = gpu_memory_of(arena);
    local.gpu = arena.context();
  }
  return local;
}

// UCX takes the host's memory, and a GPU's where it says that it can: other media go by other transports.
class UcxTransport final : public Transport {
 public:
  explicit UcxTransport(const TransportSetup& setup) {
    const UcxLocal local = offered_to_ucx(setup.memory);
    context_ = UcxContext::make(setup.settings.ucx, local, setup.memory.keepalive());
    gives_handles_ = context_->gives_handles();
    note_refused(local, setup.notes);
    if (!passes_descriptors(local, context_->refused()) || allow_tracers()) return;
    setup.notes.emplace_back(
        "the route ucx may be slow to memory of the GPU: peers may not take its descriptors (prctl PR_SET_PTRACER "
        "failed); device_memory=\"plain\" needs no such right");
  }

  std::shared_ptr<Grant> offer(const LocalMemory&, Offer& offer) override {
    std::shared_ptr<UcxContext> context;
    {
      const std::lock_guard lock(mutex_);
      context = context_;
    }
    if (context == nullptr) throw Error(ErrorCode::kClosed, "the pool is closed");
    std::shared_ptr<UcxWorker> worker = context->make_worker();
    offer.metadata.ucx = worker->blob();
    return std::make_shared<UcxGrant>(std::move(worker));
  }
  void connect(const LocalMemory&, const PeerEnd& peer, Grant* grant, Routes& routes) override {
    if (peer.metadata.ucx.empty() || grant == nullptr) return;
    UcxWorker& worker = static_cast<UcxGrant*>(grant)->worker();
    routes.push_back(worker.make_route(peer.metadata, peer.link->pidfd()));
  }
  Exposure exposure(const PeerEnd& peer) const override {
    Exposure exposure{.until_fence = true};
    if (!peer.same_host) return exposure;
    exposure.by_process = exposure.by_address = true;  // between processes of a host UCX writes as cma does, too
    // UCX opens handles even for a peer without blocks on a GPU, but not those of this process.
    const std::int64_t pid =
        peer.link->process() > 0 ? peer.link->process() : static_cast<std::int64_t>(peer.metadata.pid);
    exposure.until_exit = exposure.by_handle = gives_handles_ && pid != getpid();
    exposure.by_gpu = exposure.until_exit || peer.has_gpu();
    return exposure;
  }
  void let_go() noexcept override {
    std::shared_ptr<UcxContext> context;  // destroyed without the lock
    const std::lock_guard lock(mutex_);
    context.swap(context_);
  }

 private:
  // Throws kUnsupported when UCX takes none of the memory.
  void note_refused(const UcxLocal& local, std::vector<std::string>& notes) const {
    std::string all;
    bool takes_any = false;
    for (const Medium medium : kMedia) {
      const std::string& why = context_->refused()[medium];
      takes_any = takes_any || (local.spans[medium].blocks > 0 && why.empty());
      if (why.empty()) continue;
      const std::string note = std::string("the route ucx leaves out ") + medium_name(medium) + ": " + why;
      all += (all.empty() ? "" : "; ") + note;
      notes.push_back(note);
    }
    if (takes_any || all.empty()) return;
    throw Error(ErrorCode::kUnsupported,
                all + "; there is no other memory: leave ucx out of routes, loopback, cuda_ipc and sock reach it");
  }

  std::mutex mutex_;
  std::shared_ptr<UcxContext> context_;  // under mutex_
  bool gives_handles_ = false;           // set by the constructor
};

}  // namespace

std::unique_ptr<Transport> make_ucx_transport(const TransportSetup& setup) {
  return std::make_unique<UcxTransport>(setup);
}

}  // namespace kvpool
