// Device memory from cuMemAlloc, called by kvpool or by others, that is given to other processes of this host as IPC
// handles.
//
// A handle covers a whole allocation. An engine's allocator cuts one into many tensors, and a process that opens the
// handle sees them all. The driver's documentation requires that memory is not freed while another process has it open,
// so the process that gives handles away keeps the memory until it knows that no other has them open.
//
// Thread-safety: all functions; objects are immutable after construction, and any thread may destroy them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kvpool/cuda/context.h"

namespace kvpool {

struct IpcAllocation {
  CuPointer base = 0;  // in the process that allocated it
  std::size_t bytes = 0;
  CuIpcMemHandle handle{};
};

// The allocations that contain these ranges of the context's GPU, each once, in order of address. Empty if one of them
// has no handle: virtual memory (an allocator's expandable segments), memory of a memory pool, or a machine without
// CUDA IPC. Throws kDeviceLost, kOutOfMemory.
std::vector<IpcAllocation> ipc_allocations(const CudaContext& context,
                                           std::span<const std::span<const std::byte>> ranges);

// Another process's allocations, open here while this lives.
class OpenedMemory {
 public:
  // Throws kUnsupported (no such memory, memory of this process, or this GPU cannot access the other), kOutOfMemory,
  // kDeviceLost; then nothing stays open. REQUIRES: in order of address, without overlaps.
  OpenedMemory(std::shared_ptr<const CudaContext> context, std::span<const IpcAllocation> allocations);
  // In a forked child nothing is closed.
  ~OpenedMemory();
  OpenedMemory(const OpenedMemory&) = delete;
  OpenedMemory& operator=(const OpenedMemory&) = delete;

  // The address for this GPU of the bytes at this address of the other process; null if they lie in no allocation.
  std::byte* at(std::uint64_t address, std::size_t bytes) const noexcept;

 private:
  struct Opened {
    std::uint64_t address;  // there
    std::size_t bytes;
    CuPointer base;  // here
  };
  void close() noexcept;

  const std::shared_ptr<const CudaContext> context_;
  std::vector<Opened> opened_;  // by rising address
};

}  // namespace kvpool
