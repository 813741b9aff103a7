// Makes memory of other owners reachable for a GPU of this process.
//
// Thread-safety: immutable after construction; any thread may destroy it. Releases nothing in a forked child.
#pragma once

#include <cstddef>
#include <memory>

#include "kvpool/cuda/context.h"

namespace kvpool {

// Device memory of another process, mapped here. The allocation lives as long as any process has it mapped, so the
// other process may end.
class ImportedMemory {
 public:
  // `descriptor`: from DeviceMemory::export_descriptor() there; the caller may close it afterwards. `bytes`: of the
  // whole allocation. Throws kUnsupported (no such memory, another length, or this GPU cannot access the other),
  // kOutOfMemory, kDeviceLost. Leaves nothing behind.
  ImportedMemory(std::shared_ptr<const CudaContext> context, int descriptor, std::size_t bytes);
  ~ImportedMemory();
  ImportedMemory(const ImportedMemory&) = delete;
  ImportedMemory& operator=(const ImportedMemory&) = delete;

  std::byte* base() const noexcept;  // an address of the GPU

 private:
  void release() noexcept;

  const std::shared_ptr<const CudaContext> context_;
  const std::size_t bytes_;
  CuPointer base_ = 0;  // reserved
  bool mapped_ = false;
};

// Host memory that is registered while this lives, so that this GPU copies to and from it at full speed, and its
// kernels can access it.
class RegisteredMemory {
 public:
  // Throws as CudaDriver::require. REQUIRES: the memory stays mapped as long as this lives.
  RegisteredMemory(std::shared_ptr<const CudaContext> context, void* base, std::size_t bytes);
  ~RegisteredMemory();
  RegisteredMemory(const RegisteredMemory&) = delete;
  RegisteredMemory& operator=(const RegisteredMemory&) = delete;

  bool usable() const noexcept { return context_->usable(); }  // false in a forked child

 private:
  const std::shared_ptr<const CudaContext> context_;
  void* const base_;
};

// Page-locked memory through which content passes between a GPU and code that cannot access its memory: a socket, a
// checksum.
class PinnedBuffer {
 public:
  // Throws kOutOfMemory, and as RegisteredMemory.
  PinnedBuffer(const std::shared_ptr<const CudaContext>& context, std::size_t bytes);
  ~PinnedBuffer();
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;

  std::byte* data() const noexcept { return data_; }
  std::size_t bytes() const noexcept { return bytes_; }

 private:
  const std::size_t bytes_;
  std::byte* data_ = nullptr;
  std::unique_ptr<RegisteredMemory> registered_;
};

}  // namespace kvpool
