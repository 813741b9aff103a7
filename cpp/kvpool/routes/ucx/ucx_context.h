// The UCX context of a pool: configuration, registered memory, and the thread that serves its workers.
#pragma once

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

// Makes the context of the pool's GPU current in this thread while it lives, because UCX copies from and to a GPU's
// memory in the context that is current in its caller. Without a GPU it does nothing.
class UcxGpuScope {
 public:
  explicit UcxGpuScope(const std::shared_ptr<const CudaContext>& gpu) noexcept {
    if (gpu != nullptr) current_.emplace(*gpu);
  }

 private:
  std::optional<CurrentContext> current_;
};

class UcxWorker;

class UcxContext final : public std::enable_shared_from_this<UcxContext> {
 public:
  // `where`: "system", or a folder that holds libucp.so.0 (or a lib folder that does), or the path of libucp itself.
  // Throws kUnsupported when there is no usable UCX there; the text says what to install. Registers the memory that
  // `local` describes, which `keepalive` keeps alive; leaves out the GPU memory that UCX refuses: see refused().
  static std::shared_ptr<UcxContext> make(const std::string& where, const UcxLocal& local,
                                          std::shared_ptr<void> keepalive);
  // The same with a library that is already open. REQUIRES: a shared_ptr owns it.
  UcxContext(const UcxLibrary& ucx, const UcxLocal& local, std::shared_ptr<void> keepalive);
  ~UcxContext();

  std::shared_ptr<UcxWorker> make_worker();
  // Why UCX does not reach a medium that is on a GPU; empty for one that it reaches.
  const MediumMap<std::string>& refused() const noexcept { return memory_->refused(); }
  // Whether its keys hold IPC handles. A peer's UCX opens these and keeps them open after the route and the worker are
  // closed: only the exit of the peer's process is known to close them.
  bool gives_handles() const noexcept { return memory_->gives_handles(); }

  // --- for workers and their routes ---

  const UcxLibrary& ucx() const noexcept { return ucx_; }
  ucp_context_h handle() const noexcept { return context_; }
  const UcxMemory& memory() const noexcept { return *memory_; }
  // The part of the offered memory that UCX has registered.
  const MediaSpans& spans() const noexcept { return memory_->spans(); }
  const std::shared_ptr<const CudaContext>& gpu() const noexcept { return gpu_; }
  UcxProgress& thread() noexcept { return *thread_; }
  // Whether this process is a forked child of the one that made the context. UCX does not work in it.
  bool forked() const noexcept { return fork_generation() != born_; }
  void require_no_fork() const;  // throws kFork
  // Keeps peers that UCX has not released, and this context, until the process ends.
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
  std::shared_ptr<UcxContext> self_;  // set by keep()
};

}  // namespace kvpool
