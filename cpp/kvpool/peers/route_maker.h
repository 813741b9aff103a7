// Which ways there are to write into a peer's blocks, from what both sides said of themselves.
//
// Thread-safety: all of it.
#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kvpool/arena/arena.h"
#include "kvpool/base/copy.h"
#include "kvpool/base/segment.h"
#include "kvpool/blocks/layout.h"
#include "kvpool/net/connect/peer_metadata.h"
#include "kvpool/net/descriptor.h"
#include "kvpool/net/link.h"
#include "kvpool/peers/service.h"
#include "kvpool/routes/nccl/nccl_inbox.h"
#include "kvpool/routes/route.h"
#include "kvpool/transfer/block_host.h"

namespace kvpool {

class DeviceStaging;
class UcxContext;

// The memory that this process lets its peers write, and writes from.
struct LocalMemory {
  Layout layout;
  MediumMap<std::shared_ptr<Arena>> arenas;

  const std::shared_ptr<Arena>& arena(Medium medium) const noexcept { return arenas[medium]; }
  MediaSpans spans() const;
  // Of these, what the CPU can follow, and what this GPU can; the other media have no blocks.
  MediaSpans host_spans() const;
  MediaSpans gpu_spans(const CudaContext& gpu) const;
  // The media that are on a GPU, and the GPU that they are on; null without any.
  MediaSet on_gpu() const noexcept;
  std::shared_ptr<const CudaContext> gpu() const noexcept;
  // Keeps the memory of spans() alive.
  std::shared_ptr<void> keepalive() const;
};

class RouteMaker {
 public:
  // Throws kArgument for a route that does not exist; kUnsupported when ucx is asked for by name and there is none, or
  // none that takes any of this memory, or nccl, and there is none or no HBM on a GPU.
  // Memory that is not here (of the scheduler of a logical instance) has no routes.
  RouteMaker(const ServiceOptions& options, LocalMemory memory, std::uint64_t epoch);
  ~RouteMaker();

  // Where the receiving half of routes works that take part of it; without, there are none. Before the first make().
  void receive_by(NcclRun run) { run_ = std::move(run); }

  // What a route leaves out of this pool's memory, and why.
  const std::vector<std::string>& notes() const noexcept { return notes_; }

  // The pool is closed: keeps and registers its memory no longer, and is asked nothing more.
  void let_go() noexcept;
  // Throws kClosed once it was let go of.
  LocalMemory memory() const;

  // What this pool says of itself to one peer: routes, media, ucx, host, pid. Returns what its link is to keep.
  std::shared_ptr<void> introduce(PeerMetadata& metadata) const;
  // The arenas' descriptors, in the order of the media that can be mapped.
  std::vector<int> descriptors() const;

  // For content that a link brings for these blocks of this memory: as BlockHost::staging_buffer. Throws kClosed, too.
  std::unique_ptr<StagingBuffer> staging_buffer(std::span<const Address> blocks, std::vector<iovec>& pieces,
                                                std::uint64_t bytes) const;

  // Every route that both sides can go. Throws kUnsupported when there is none.
  std::vector<std::shared_ptr<Route>> make(const PeerMetadata& peer, const std::shared_ptr<Link>& link);
  // By what the peer can write here by itself, from what it was given.
  struct Exposure {
    bool by_process = false;  // its process writes, or the kernel for it: its end is the proof that it does not
    bool by_address = false;  // of these, to addresses of this process, whatever memory is there by then
    bool by_gpu = false;      // of these, by a GPU that its process has set to work: see WriterQuarantine
    bool by_handle = false;   // of these, to memory that it has open, and that must not be freed before it is closed
    bool until_exit = false;  // of these, by UCX: open until its process has ended, whatever it says
    bool by_ucx = false;      // UCX writes, also what is on its way: fence() is the proof
    bool any() const noexcept { return by_process || by_ucx; }
    // Whether it may have memory open. `said_over`: it has said that it writes no more.
    bool may_hold(bool said_over) const noexcept { return by_handle && (until_exit || !said_over); }
  };
  Exposure exposure(const PeerMetadata& peer, const Link& link) const;
  // Ends what arrives by UCX over this link. May take seconds. False when UCX did not let go.
  static bool fence(const Link& link) noexcept;

 private:
  bool offers(const char* name) const;
  std::shared_ptr<Route> make_nccl(const LocalMemory& memory, const std::shared_ptr<Link>& link) const;
  std::shared_ptr<Route> make_one(const std::string& name, const PeerMetadata& peer, const std::shared_ptr<Link>& link);
  std::shared_ptr<Route> make_cuda_ipc(const PeerMetadata& peer, const Link& link);
  std::shared_ptr<Route> make_gpu_loopback(const PeerMetadata& peer, const Link& link);
  void prepare_gpu();
  // What lets peers map what is on this GPU. Throws as CudaDriver::require.
  void export_gpu_memory(const CudaContext& gpu);
  void prepare_ucx(const std::string& where);
  bool gives_handles() const noexcept;
  // What a peer can be given to map a medium with; -1: nothing.
  int descriptor_of(Medium medium, const Arena& arena) const;

  std::vector<std::string> names_;  // set by the constructor
  const std::uint64_t epoch_;
  CopyTeam team_;
  const NcclLibrary* nccl_ = nullptr;
  const NcclLimits nccl_limits_;
  bool ucx_gives_handles_ = false;  // set by the constructor
  std::vector<std::string> notes_;  // set by the constructor
  NcclRun run_;
  mutable std::mutex mutex_;
  LocalMemory memory_;                      // under mutex_; none once it was let go of
  std::shared_ptr<UcxContext> ucx_;         // likewise
  std::shared_ptr<DeviceStaging> staging_;  // likewise; null without a GPU
  MediumMap<Descriptor> exported_;          // of media on a GPU; set by the constructor
  // Of such media that have no descriptor; likewise.
  MediumMap<std::vector<MetadataAllocation>> given_;
};

// Pools of this process, so that they find each other's memory: by epoch.
class ProcessPools {
 public:
  static void add(std::uint64_t epoch, const LocalMemory& memory);
  static void remove(std::uint64_t epoch) noexcept;
  static std::optional<LocalMemory> find(std::uint64_t epoch);
};

}  // namespace kvpool
