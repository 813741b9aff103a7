// An arena: the bytes of all blocks of one medium.
//
// A block is a sequence of pieces. An arena stores piece s of all its blocks in segment s: piece s of block b is
// [base + b * stride, base + b * stride + bytes). One segment is the aggregated layout (a block is one run of bytes);
// 2 * layers segments are the discrete layout (a layer's K or V each), as engines keep it. The concatenation of a
// block's pieces in segment order is its canonical content: two arenas of one pool may cut it at different places.
//
// Owned memory is one memfd mapping, which peers on the host can map too and which is committed when the arena is made;
// or one allocation on a GPU (device_arena.h). Adopted memory belongs to an engine; the arena only keeps it alive.
//
// Only the GPU and the driver may dereference the segment addresses of an arena on a GPU: see on_device().
//
// Thread-safety: immutable after construction. Shared ownership: a view of the memory keeps the arena.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kvpool/base/medium.h"
#include "kvpool/base/segment.h"

namespace kvpool {

class CudaContext;
class DeviceMemory;

enum class HugePages : std::uint8_t { kAuto, kNever, kRequire };

struct ArenaOptions {
  Medium medium = Medium::kDram;
  std::uint32_t blocks = 0;
  std::vector<std::size_t> segment_bytes;  // piece length of each segment; the sum is the block's bytes
  HugePages huge_pages = HugePages::kAuto;
  int numa_node = -1;        // -1: the kernel chooses
  bool check_memory = true;  // refuse when the machine or its cgroup has too little (Error kOutOfMemory)
  bool pin = false;          // register with CUDA (Error kUnsupported when there is no CUDA driver)
  int pin_device = -1;       // register in this GPU's context; -1: that of the thread's current GPU, or of the first
  std::string label;         // shown in /proc/self/maps
  int commit_threads = 2;
};

class Arena {
 public:
  virtual ~Arena() = default;

  Medium medium() const noexcept { return medium_; }
  std::uint32_t blocks() const noexcept { return blocks_; }
  std::size_t block_bytes() const noexcept { return block_bytes_; }
  virtual std::size_t payload_bytes() const noexcept { return static_cast<std::size_t>(blocks_) * block_bytes_; }
  const std::vector<Segment>& segments() const noexcept { return segments_; }

  // Bytes of address space backed by memory: payload rounded up to a page. 0 for adopted memory.
  std::size_t mapped_bytes() const noexcept { return mapped_bytes_; }
  std::size_t huge_page_bytes() const noexcept { return huge_page_bytes_; }  // of these, in huge pages
  int memfd() const noexcept { return memfd_; }                              // -1 for adopted memory and on a GPU
  bool owned() const noexcept { return owned_; }
  bool pinned() const noexcept { return pinned_; }

  // Whether the memory is on a GPU: then the CPU may not dereference segment addresses; the driver makes the copies.
  bool on_device() const noexcept { return context_ != nullptr; }
  const std::shared_ptr<const CudaContext>& context() const noexcept { return context_; }  // null: ordinary memory
  // The GPU memory that this arena owns; null for adopted or ordinary memory, or without blocks.
  virtual const DeviceMemory* device_memory() const noexcept { return nullptr; }

 protected:
  Medium medium_ = Medium::kDram;
  std::uint32_t blocks_ = 0;
  std::size_t block_bytes_ = 0;
  std::size_t mapped_bytes_ = 0;
  std::size_t huge_page_bytes_ = 0;
  int memfd_ = -1;
  bool owned_ = false;
  bool pinned_ = false;
  std::vector<Segment> segments_;
  std::shared_ptr<const CudaContext> context_;
};

// The checked size of an arena.
struct ArenaSize {
  std::size_t block_bytes;
  std::size_t payload_bytes;
};
// Throws Error kArgument: too many blocks, no segments, a piece of zero bytes, more bytes than any memory has.
ArenaSize arena_size(std::uint32_t blocks, const std::vector<std::size_t>& segment_bytes);
// The first pieces of all blocks, then the second pieces of all blocks, and so on, without gaps.
std::vector<Segment> arena_segments(std::byte* base, std::uint32_t blocks,
                                    const std::vector<std::size_t>& segment_bytes);

// Throws Error: kArgument (sizes overflow, no segments, a piece of zero bytes), kOutOfMemory (with needed, available
// and which limit), kUnsupported (huge pages or pinning were required and are not available). Leaves nothing behind.
// blocks == 0 makes an arena without memory.
std::shared_ptr<Arena> make_owned_arena(const ArenaOptions& options);

// The arena releases `keepalive` when it ends. `context`: of the GPU that the memory is on; null: ordinary memory.
// Throws Error kLayoutMismatch when pieces overlap.
std::shared_ptr<Arena> make_adopted_arena(Medium medium, std::uint32_t blocks, std::vector<Segment> segments,
                                          std::shared_ptr<void> keepalive,
                                          std::shared_ptr<const CudaContext> context = nullptr);

// Blocks in the memory of another arena, `stride` bytes apart from its beginning. With a stride below their length
// blocks overlap: then somebody else sees to it that of those no two are used at a time. Peers on the host can map that
// memory. `base` is made of one segment. Throws kArgument.
std::shared_ptr<Arena> make_view_arena(std::shared_ptr<Arena> base, std::uint32_t blocks, std::size_t block_bytes,
                                       std::size_t stride);

// An arena without segments, for blocks whose memory is in the ranks of a logical instance. It only counts them.
std::shared_ptr<Arena> make_absent_arena(Medium medium, std::uint32_t blocks, std::size_t block_bytes);

struct MemoryHeadroom {
  std::uint64_t available_bytes;  // the smallest of the limits below
  std::string limit;              // which: "MemAvailable" or the cgroup's path
};
// How much can be committed now: /proc/meminfo MemAvailable, and memory.max - memory.current (less reclaimable cache)
// of this process's cgroup (v2 or v1) and all of its ancestors. `root` prefixes every path, for tests.
MemoryHeadroom memory_headroom(const std::string& root = "");

}  // namespace kvpool
