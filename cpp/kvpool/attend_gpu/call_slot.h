// A stream of a GPU and memory for one call of attention at a time.
//
//   A16  What a call has put into the stream uses the slot's memory until drain() has said that it has ended. When it
//        cannot say so, the GPU is lost: no later call uses the memory.
//
// Memory that has become too small is kept until the slot goes: to free it would wait for all work of the GPU, which a
// decoding step must not. Sizes double, so all of it together is at most twice what the largest call needed.
//
// Thread-safety: none; any thread may destroy it.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "kvpool/cuda/context.h"
#include "kvpool/cuda/shared_memory.h"
#include "kvpool/cuda/stream.h"

namespace kvpool {

class CallSlot {
 public:
  // REQUIRES, here and below: the context is current, except in the destructor.
  explicit CallSlot(const std::shared_ptr<const CudaContext>& context) : context_(context), stream_(context) {}
  ~CallSlot();
  CallSlot(const CallSlot&) = delete;
  CallSlot& operator=(const CallSlot&) = delete;

  CuStream stream() const noexcept { return stream_.handle(); }
  // At least so many bytes of the GPU, and of the host, page-locked. Throws kOutOfMemory, kDeviceLost.
  void make_room(std::size_t device_bytes, std::size_t host_bytes);
  CuPointer device() const noexcept { return device_.empty() ? 0 : device_.back().at; }
  std::byte* host() const noexcept { return host_.empty() ? nullptr : host_.back()->data(); }
  // Copies within the stream: from the host's memory, at its beginning; and back, to `host_at`.
  void upload(std::size_t bytes);
  void download(std::size_t host_at, std::size_t device_at, std::size_t bytes);
  // Returns when all work of the stream has ended. Throws kDeviceLost when that cannot be known.
  void drain();

 private:
  struct DeviceMemory {
    CuPointer at;
    std::size_t bytes;
  };

  const std::shared_ptr<const CudaContext> context_;
  CudaStream stream_;
  std::vector<DeviceMemory> device_;  // the last is in use
  std::vector<std::unique_ptr<PinnedBuffer>> host_;
  std::size_t host_bytes_ = 0;  // of the last
};

}  // namespace kvpool
