// The memory that peers may write through UCX: this pool's, registered once, and a peer's, as its blob describes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvpool/base/segment.h"
#include "kvpool/transport/card.h"
#include "kvpool/transport/ucx_library.h"

namespace kvpool {

struct UcxExtent {
  std::uint64_t base;
  std::uint64_t bytes;
};

// The memory of all blocks: what overlaps or touches within a medium is one extent. In order of addresses.
std::vector<UcxExtent> ucx_extents(const MediaSpans& spans);

// This pool's memory. Thread-safe after construction.
class UcxMemory {
 public:
  // Throws Error kUnsupported when UCX cannot register it. The context outlives it.
  UcxMemory(const UcxLibrary& ucx, ucp_context_h context, const MediaSpans& spans);
  ~UcxMemory();
  UcxMemory(const UcxMemory&) = delete;
  UcxMemory& operator=(const UcxMemory&) = delete;

  struct Region {
    std::uint64_t base;
    std::uint64_t bytes;
    ucp_mem_h handle;
    Bytes key;  // packed
  };
  std::span<const Region> regions() const noexcept { return regions_; }
  // The region that holds this address; null: none.
  const Region* find(const void* address) const noexcept;
  // In a forked child: forget everything, free nothing.
  void abandon() noexcept { regions_.clear(); }

 private:
  void unmap() noexcept;

  const UcxLibrary& ucx_;
  ucp_context_h context_;
  std::vector<Region> regions_;
};

// What PeerCard::ucx holds:
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
// An address or a key as UCX must be given it. UCX reads both without knowing where they end, so zeros follow, in which
// a wrong one comes to an end. What is in them cannot be checked: it is trusted as the authenticated peer itself is.
Bytes ucx_padded(std::span<const std::byte> bytes);

// Throws Error kProtocol when the card's blocks lie outside of the blob's regions.
void require_covered(const PeerCard& card, const UcxBlob& blob);

}  // namespace kvpool
