// GPU memory, allocated once for a whole arena.
//
// One physical allocation, mapped at one range of addresses (cuMem*): peers get it as a file descriptor, and every GPU
// of this process that can reach it has access. If the GPU, the driver, or a library that uses the memory (UCX before
// 1.22) does not support that, it is plain memory (cuMemAlloc), which peers get as an IPC handle.
//
// Thread-safety: immutable after construction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kvpool/cuda/context.h"

namespace kvpool {

enum class DeviceMemoryKind : std::uint8_t {
  kAuto,     // virtual; plain if the driver refuses (NOT_PERMITTED, NOT_SUPPORTED)
  kVirtual,  // cuMem*: exported as a file descriptor
  kPlain,    // cuMemAlloc: exported as an IPC handle
};

class DeviceMemory {
 public:
  // At least `bytes`, with undefined content. With check_memory, refuses before asking the driver what does not fit
  // into the memory that is free now. Throws Error: kOutOfMemory with needed_bytes, available_bytes and total_bytes;
  // kUnsupported; kDeviceLost. Leaves nothing behind. REQUIRES: bytes > 0.
  DeviceMemory(std::shared_ptr<const CudaContext> context, std::size_t bytes, DeviceMemoryKind kind, bool check_memory);
  // In a forked child nothing is freed.
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  CuPointer base() const noexcept { return base_; }
  std::size_t bytes() const noexcept { return bytes_; }  // allocated: rounded up to the device's granularity
  DeviceMemoryKind kind() const noexcept { return kind_; }
  const std::vector<int>& peers() const noexcept { return peers_; }  // other GPUs that may access it

  // A file descriptor of the whole allocation, which the caller closes. Throws kUnsupported unless kVirtual.
  int export_descriptor() const;
  // Throws kUnsupported unless kPlain.
  CuIpcMemHandle export_handle() const;

 private:
  bool make_virtual(std::size_t bytes, bool check_memory);
  void make_plain(std::size_t bytes, bool check_memory);
  void check_room(std::size_t bytes) const;
  void give_access();
  // As CudaDriver::require; an out-of-memory error says how much memory there is.
  void require(CuResult result, const char* call) const;
  [[noreturn]] void throw_out_of_memory(CuResult result) const;
  void free() noexcept;

  std::shared_ptr<const CudaContext> context_;
  const DeviceMemoryKind wanted_;
  DeviceMemoryKind kind_ = DeviceMemoryKind::kPlain;
  CuPointer base_ = 0;   // reserved, or allocated
  CuHandle handle_ = 0;  // 0: none
  std::size_t bytes_ = 0;
  bool mapped_ = false;
  std::vector<int> peers_;
};

}  // namespace kvpool
