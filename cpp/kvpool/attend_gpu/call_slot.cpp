#include "kvpool/attend_gpu/call_slot.h"

#include <algorithm>
#include <bit>
#include <cstdint>

#include "kvpool/cuda/wait_word.h"

namespace kvpool {
namespace {

constexpr const char* kWhat = "attention on a GPU";
constexpr std::size_t kBytesMin = std::size_t{1} << 20;

std::size_t rounded(std::size_t bytes) noexcept { return std::bit_ceil(std::max(bytes, kBytesMin)); }

}  // namespace

CallSlot::~CallSlot() {
  const CurrentContext current(*context_);
  if (!current) return;
  for (const DeviceMemory& memory : device_) context_->driver().mem_free(memory.at);
}

void CallSlot::make_room(std::size_t device_bytes, std::size_t host_bytes) {
  if (device_.empty() || device_.back().bytes < device_bytes) {
    device_.reserve(device_.size() + 1);
    DeviceMemory memory{0, rounded(device_bytes)};
    context_->driver().require(context_->driver().mem_alloc(&memory.at, memory.bytes), "cuMemAlloc", kWhat);
    device_.push_back(memory);
  }
  if (host_bytes_ < host_bytes) {
    const std::size_t bytes = rounded(host_bytes);
    host_.push_back(std::make_unique<PinnedBuffer>(context_, bytes));
    host_bytes_ = bytes;
  }
}

void CallSlot::upload(std::size_t bytes) {
  context_->driver().require(
      context_->driver().memcpy_async(device(), reinterpret_cast<std::uintptr_t>(host()), bytes, stream_.handle()),
      "cuMemcpyAsync", kWhat);
}

void CallSlot::download(std::size_t host_at, std::size_t device_at, std::size_t bytes) {
  context_->driver().require(context_->driver().memcpy_async(reinterpret_cast<std::uintptr_t>(host() + host_at),
                                                             device() + device_at, bytes, stream_.handle()),
                             "cuMemcpyAsync", kWhat);
}

void CallSlot::drain() {
  // Nothing here follows a stream that waits for a word, but the GPU may have put the work behind it in one queue.
  if (words_unset(*context_) && !stream_.ends_within(kWordPatienceNs)) force_words(*context_);
  stream_.drain(kWhat);
}

}  // namespace kvpool
