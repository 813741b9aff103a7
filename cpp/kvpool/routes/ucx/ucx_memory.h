// The memory that peers may write through UCX: this pool's, registered once, and a peer's, as its blob describes it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvpool/base/media_set.h"
#include "kvpool/base/segment.h"
#include "kvpool/net/connect/peer_metadata.h"
#include "kvpool/routes/ucx/ucx.h"
#include "kvpool/routes/ucx/ucx_library.h"

namespace kvpool {

struct UcxExtent {
  std::uint64_t base;
  std::uint64_t bytes;
};

// The memory of all blocks of a medium, in order of addresses. Joins segments that overlap or touch into one extent;
// with `by_segment`, only those that overlap, because segments that touch may be separate allocations.
std::vector<UcxExtent> ucx_extents(const MediumSpan& span, bool by_segment);

// This pool's memory. Thread-safe after construction.
class UcxMemory {
 public:
  // Throws Error kUnsupported when UCX cannot register host memory; leaves out a GPU medium that it cannot register.
  // The context outlives it.
  UcxMemory(const UcxLibrary& ucx, ucp_context_h context, const UcxLocal& local);
  ~UcxMemory();
  UcxMemory(const UcxMemory&) = delete;
  UcxMemory& operator=(const UcxMemory&) = delete;

  struct Region {
    std::uint64_t base;
    std::uint64_t bytes;
    ucp_mem_h handle;
    Bytes key;  // packed
    bool on_gpu = false;
  };
  std::span<const Region> regions() const noexcept { return regions_; }
  // The region that contains this address, or null.
  const Region* find(const void* address) const noexcept;
  // The offered spans without the media that are left out, and why those are.
  const MediaSpans& spans() const noexcept { return spans_; }
  const MediaSet& on_gpu() const noexcept { return on_gpu_; }
  const MediumMap<std::string>& refused() const noexcept { return refused_; }
  // Whether UCX gives some of it to peers as IPC handles. It does not for memory of cuMemCreate, which an import keeps
  // alive.
  bool gives_handles() const noexcept { return gives_handles_; }
  // In a forked child: forgets everything, frees nothing.
  void abandon() noexcept { regions_.clear(); }

 private:
  void map(const UcxExtent& extent, bool on_gpu, std::vector<Region>& out);
  void unmap(std::vector<Region>& regions) noexcept;

  const UcxLibrary& ucx_;
  ucp_context_h context_;
  MediaSpans spans_;
  MediaSet on_gpu_{};
  bool gives_handles_ = false;
  MediumMap<std::string> refused_;
  std::vector<Region> regions_;  // in order of addresses
};

// The content of PeerMetadata::ucx:
//   u32 version | text version of UCX | blob worker address | u32 count | count x (u64 base, u64 bytes, blob key)
struct UcxBlob {
  struct Region {
    std::uint64_t base;
    std::uint64_t bytes;
    Bytes key;
  };
  std::string ucx_version;
  Bytes address;
  std::vector<Region> regions;  // in order of addresses, apart from each other
};

Bytes write_ucx_blob(const std::string& ucx_version, std::span<const std::byte> address,
                     std::span<const UcxMemory::Region> regions);
// Throws Error kProtocol.
UcxBlob read_ucx_blob(std::span<const std::byte> bytes);
// An address or a key, prepared for UCX. UCX reads both without knowing their length, so zeros are appended, in which a
// malformed one ends. Their content cannot be checked; it is trusted like the authenticated peer itself.
Bytes ucx_padded(std::span<const std::byte> bytes);

// The media of the metadata whose blocks the blob's keys open: all host media, while a GPU medium may have been left
// out. Throws Error kProtocol when blocks of another medium lie outside of the keys.
MediaSet require_covered(const PeerMetadata& metadata, const UcxBlob& blob);

}  // namespace kvpool
