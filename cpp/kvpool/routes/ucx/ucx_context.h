// The UCX context of a pool: configuration, registered memory, and the thread that serves its workers.
#pragma once

#include <array>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <string>

#include "kvpool/base/fork_guard.h"
#include "kvpool/routes/ucx/ucx.h"
#include "kvpool/routes/ucx/ucx_library.h"
#include "kvpool/routes/ucx/ucx_memory.h"
#include "kvpool/routes/ucx/ucx_progress.h"

namespace kvpool {

struct UcxPeer;

// While it lives, the pool's GPU is the one that this thread works on: UCX copies from and to a GPU's memory in
// whatever context is current in the thread that calls it. Without a GPU, nothing.
class UcxGpuScope {
 public:
  explicit UcxGpuScope(const std::shared_ptr<const CudaContext>& gpu) noexcept {
    if (gpu != nullptr) current_.emplace(*gpu);
  }

 private:
  std::optional<CurrentContext> current_;
};

class UcxContextCore final : public UcxContext, public std::enable_shared_from_this<UcxContextCore> {
 public:
  UcxContextCore(const UcxLibrary& ucx, const UcxLocal& local, std::shared_ptr<void> keepalive);
  ~UcxContextCore() override;

  std::shared_ptr<UcxWorker> make_worker() override;
  const MediumMap<std::string>& refused() const noexcept override { return memory_->refused(); }
  bool gives_handles() const noexcept override { return memory_->gives_handles(); }

  const UcxLibrary& ucx() const noexcept { return ucx_; }
  ucp_context_h handle() const noexcept { return context_; }
  const UcxMemory& memory() const noexcept { return *memory_; }
  // Of what was offered, what UCX has taken.
  const MediaSpans& spans() const noexcept { return memory_->spans(); }
  const std::shared_ptr<const CudaContext>& gpu() const noexcept { return gpu_; }
  UcxProgress& thread() noexcept { return *thread_; }
  // This is a child of the process that made the context: UCX does not live here.
  bool forked() const noexcept { return fork_generation() != born_; }
  void require_no_fork() const;  // throws kFork
  // UCX did not let go of these: they, and everything here, stay until the process ends.
  void keep(std::list<std::shared_ptr<UcxPeer>>& peers) noexcept;

 private:
  const UcxLibrary& ucx_;
  const std::shared_ptr<const CudaContext> gpu_;
  const std::shared_ptr<void> keepalive_;
  const std::uint32_t born_;
  ucp_context_h context_ = nullptr;
  std::unique_ptr<UcxMemory> memory_;
  std::unique_ptr<UcxProgress> thread_;
  std::list<std::shared_ptr<UcxPeer>> kept_;
  std::shared_ptr<UcxContextCore> self_;  // when something is kept
};

}  // namespace kvpool
