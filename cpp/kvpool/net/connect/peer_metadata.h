// What each peer tells the other when they connect, after both have proved that they know the secret.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kvpool/base/medium.h"
#include "kvpool/base/page_format.h"
#include "kvpool/net/wire.h"

namespace kvpool {

inline constexpr std::size_t kNameBytesMax = 255;
inline constexpr std::size_t kMetadataSegmentsMax = 2 * 4096;  // K and V of 4,096 layers
inline constexpr std::size_t kMetadataAllocationsMax = kMetadataSegmentsMax;
inline constexpr std::size_t kMetadataHandleBytes = 64;
inline constexpr std::size_t kMetadataBlockTokensMax = 65536;
inline constexpr std::size_t kMetadataModelBytesMax = 1024;
inline constexpr std::size_t kMetadataRoutesMax = 16;
inline constexpr std::size_t kMetadataRouteBytesMax = 32;
inline constexpr std::size_t kMetadataUcxBytesMax = std::size_t{256} << 10;
inline constexpr std::size_t kMetadataRanksMax = 4096;
inline constexpr std::size_t kMetadataAddressBytesMax = 512;
inline constexpr std::uint32_t kMetadataShapeMax = 1U << 20;  // of each number of a shape
inline constexpr std::size_t kMetadataLocalSocketBytesMax =
    107;  // what a socket's address has room for, without its leading zero

// Where the pieces of a medium's blocks lie in the peer's own address space. The lowest address of a medium's segments
// is where its memfd, or its allocation on a GPU, is mapped, so the offset within that is the distance from there.
struct MetadataSegment {
  std::uint64_t address;
  std::uint64_t stride;
  std::uint64_t bytes;
};

enum class MemoryKind : std::uint8_t {
  kHost = 0,
  kGpu = 1,  // addresses are a GPU's, and what can be mapped is an allocation of it
};

// Memory of a GPU that segments lie in and that a process of this host can open: an allocation of cuMemAlloc.
struct MetadataAllocation {
  std::uint64_t address;  // in the peer's own address space
  std::uint64_t bytes;
  std::byte handle[kMetadataHandleBytes];  // CUipcMemHandle
};

struct MetadataMedium {
  std::uint32_t blocks = 0;
  std::uint64_t mapped_bytes = 0;  // of the memfd or allocation; 0 when the memory cannot be mapped
  std::vector<MetadataSegment> segments;
  MemoryKind kind = MemoryKind::kHost;
  // In order of address; empty: the memory has no handles. Handles are never sent to another host.
  std::vector<MetadataAllocation> allocations = {};
};

// A rank of a logical instance, and where the ranks of a peer connect to it.
struct MetadataRank {
  std::uint32_t rank = 0;
  std::uint64_t incarnation = 0;  // number of its process
  std::string address;            // as Endpoint::listen returns them
};

struct PeerMetadata {
  std::string name;               // 1 to 255 bytes, unique among the peers of a pool
  std::uint32_t instance = 0;     // of the addresses that it gives out
  std::uint64_t incarnation = 0;  // number: a restarted process has another; never 0
  std::uint64_t pid = 0;          // in its own PID namespace
  std::string host;               // boot id and PID namespace: equal means that pids mean the same
  std::uint32_t block_tokens = 0;
  std::vector<std::uint64_t> piece_bytes;  // of the logical block, as in Layout
  std::string model;                       // fingerprint, told by the user; "" when none
  std::vector<std::string> routes;         // by which it lets others write: "loopback", "shm", "cuda_ipc", ...
  MediumMap<MetadataMedium> media;
  Bytes ucx;                 // of the ucx transport: worker address and rkeys; empty without it
  std::string local_socket;  // abstract Unix socket (name without the leading zero) for peers on this host

  PageFormat format;  // of the pieces, as in Layout

  // The number of this connection, the same on both sides; the client chooses it. Channels between ranks belong to the
  // meeting of their schedulers.
  std::uint64_t meeting = 0;
  // A rank: the incarnation of its logical instance's scheduler, and its number there. 0: a pool.
  std::uint64_t rank_of = 0;
  std::uint32_t rank = 0;
  std::string address;  // of a rank: where ranks of peers connect to it
  // The scheduler of a logical instance: its media have blocks and no memory; these have the memory.
  std::uint32_t tp = 0;                     // 0: an instance of one rank, this pool
  std::vector<std::uint32_t> stage_layers;  // of each pipeline stage
  std::vector<MetadataRank> ranks;

  bool is_group() const noexcept { return tp > 0; }
};

// Throw Error kProtocol; both check every number and text, so that what read_metadata returns can be computed with: no
// sum or product of addresses, strides and blocks overflows, all blocks of a mapped medium lie within its memfd, and
// those of a medium with allocations each segment in one of them. The caller checks that the name is free, and it
// checks incarnations and fingerprints.
void write_metadata(const PeerMetadata& metadata, WireWriter& out);
PeerMetadata read_metadata(WireReader& in);

// Whether it contains handles that only processes on its host may receive.
bool has_handles(const PeerMetadata& metadata) noexcept;

// The value of PeerMetadata::host for this process. If the kernel does not identify the host, the value is unique to
// this process.
std::string host_id();

}  // namespace kvpool
