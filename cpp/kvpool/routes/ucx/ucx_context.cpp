#include "kvpool/routes/ucx/ucx_context.h"

#include <cstdlib>

#include "kvpool/routes/ucx/ucx_route.h"
#include "kvpool/routes/ucx/ucx_worker.h"

namespace kvpool {
namespace {

// Versions before take no settings of single transports from programs. Between processes of a host they use tcp.
constexpr unsigned kMinorTransportSettings = 17;

// Unless the user has said otherwise, in UCX's own way. A name that this version does not have is left out.
void prefer(const UcxLibrary& ucx, ucp_config_t* config, const char* name, const char* value) {
  if (std::getenv((std::string("UCX_") + name).c_str()) == nullptr) ucx.config_modify(config, name, value);
}

ucp_context_h make_context(const UcxLibrary& ucx) {
  ucp_config_t* config = nullptr;
  ucx.require(ucx.config_read(nullptr, nullptr, &config), "ucp_config_read");
  if (ucx.minor >= kMinorTransportSettings) {
    // An endpoint that tells of its peer's death uses those transports only that say they notice it. Shared memory does
    // not say so by itself, and without it UCX sends everything through tcp, twenty times slower.
    prefer(ucx, config, "POSIX_ERROR_HANDLING", "y");
    prefer(ucx, config, "SYSV_ERROR_HANDLING", "y");
    // Nor does it put through cma, or any memory that it cannot take the keys of away again, for fear of a rendezvous
    // that goes on after an error. We send no messages, so no rendezvous happens. The second is for older versions.
    prefer(ucx, config, "RNDV_THRESH", "inf");
    prefer(ucx, config, "CMA_MEMORY_INVALIDATE", "y");
  }
  prefer(ucx, config, "KEEPALIVE_INTERVAL", "1s");  // 20 s otherwise
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED | UCP_PARAM_FIELD_NAME;
  params.features = UCP_FEATURE_RMA | UCP_FEATURE_WAKEUP;
  params.mt_workers_shared = 1;
  params.name = "kvpool";
  ucp_context_h context = nullptr;
  const ucs_status_t status = ucx.init_version(UCP_API_MAJOR, 13, &params, config, &context);
  ucx.config_release(config);
  ucx.require(status, "ucp_init");
  return context;
}

}  // namespace

UcxContext::UcxContext(const UcxLibrary& ucx, const UcxLocal& local, std::shared_ptr<void> keepalive)
    : ucx_(ucx), gpu_(local.gpu), keepalive_(std::move(keepalive)), born_(fork_generation()) {
  const UcxGpuScope current(gpu_);
  context_ = make_context(ucx);
  try {
    memory_ = std::make_unique<UcxMemory>(ucx_, context_, local);
    thread_ = std::make_unique<UcxProgress>();
  } catch (...) {
    memory_.reset();
    ucx_.cleanup(context_);
    throw;
  }
}

UcxContext::~UcxContext() {
  if (forked()) {
    thread_->abandon();
    memory_->abandon();
    return;
  }
  const UcxGpuScope current(gpu_);
  thread_.reset();
  memory_.reset();
  ucx_.cleanup(context_);
}

std::shared_ptr<UcxWorker> UcxContext::make_worker() {
  require_no_fork();
  return std::make_shared<UcxWorker>(shared_from_this());
}

void UcxContext::require_no_fork() const {
  if (forked()) throw Error(ErrorCode::kFork, "this process is a fork of the one that opened UCX");
}

void UcxContext::keep(std::list<std::shared_ptr<UcxPeer>>& peers) noexcept {
  kept_.splice(kept_.end(), peers);
  self_ = weak_from_this().lock();
}

std::shared_ptr<UcxContext> UcxContext::make(const std::string& where, const UcxLocal& local,
                                             std::shared_ptr<void> keepalive) {
  return std::make_shared<UcxContext>(load_ucx(where), local, std::move(keepalive));
}

std::string describe_ucx(const std::string& where) {
  const UcxLibrary& ucx = load_ucx(where);
  return "UCX " + ucx.version + " in " + ucx.path;
}

// Two workers of this process choose as two processes do: UCX looks at the host, and at what an endpoint must notice.
std::vector<std::string> probe_ucx_lanes(const std::string& where) {
  constexpr std::size_t kBytes = 4096;
  const std::shared_ptr<std::byte[]> memory(new std::byte[kBytes]);
  MediaSpans spans;
  spans[0] = {1, {{memory.get(), kBytes, kBytes}}};
  const auto context = UcxContext::make(where, {.spans = spans, .gpu = nullptr}, memory);
  const auto here = context->make_worker();
  const auto there = context->make_worker();
  PeerMetadata metadata;
  metadata.name = "probe";
  metadata.media[Medium::kHbm].blocks = 1;
  metadata.media[Medium::kHbm].segments = {{reinterpret_cast<std::uint64_t>(memory.get()), kBytes, kBytes}};
  metadata.ucx = there->blob();
  return here->make_route(metadata)->lanes();
}

}  // namespace kvpool
