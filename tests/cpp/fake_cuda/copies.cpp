// Copies and fills in the fake driver's streams.
#include <cstring>

#include "state.h"

namespace kvpool::fake_cuda {
namespace {

// The error of work whose memory was freed meanwhile.
void break_context(Context* context) {
  if (context->lost == 0) context->lost = kIllegalAddress;
}

struct Copy {
  Address to;
  Address from;
  std::size_t bytes;
};

bool is_pinned(Address address, std::size_t bytes) { return !on_device(address) && is_registered(address, bytes); }

// REQUIRES: the lock.
bool can_copy(const Copy& copy, int device) {
  return host_address(copy.to, copy.bytes, device) != nullptr && host_address(copy.from, copy.bytes, device) != nullptr;
}

void count_pageable(const Copy& copy) {
  for (const Address address : {copy.to, copy.from}) {
    if (!on_device(address) && !is_registered(address, copy.bytes)) ++state().counts["pageable"];
  }
}

// The bytes are moved without the lock: a copy that nothing orders against this one races with it, as on a GPU, and as
// TSan sees. `pinned`: whether each side was host memory that the GPU reached by itself when the copy was put here.
void copy_now(const Copy& copy, const bool (&pinned)[2], Context* context) {
  std::byte* to = nullptr;
  std::byte* from = nullptr;
  std::shared_ptr<Physical> keep[2];
  {
    State& s = state();
    const std::lock_guard lock(s.mutex);
    if (context->lost != 0) return;
    to = host_address(copy.to, copy.bytes, context->device);
    from = host_address(copy.from, copy.bytes, context->device);
    const bool unlocked =
        (pinned[0] && !is_pinned(copy.to, copy.bytes)) || (pinned[1] && !is_pinned(copy.from, copy.bytes));
    if (to == nullptr || from == nullptr || unlocked) return break_context(context);
    keep[0] = physical_at(copy.to);
    keep[1] = physical_at(copy.from);
    ++s.counts["copied"];
    s.counts["bytes copied"] += copy.bytes;
  }
  std::memmove(to, from, copy.bytes);
}

// REQUIRES: the lock.
void add_copy(Stream* stream, const Copy& copy) {
  const bool pinned[2] = {is_pinned(copy.to, copy.bytes), is_pinned(copy.from, copy.bytes)};
  stream->add([copy, pinned, context = stream->context] { copy_now(copy, pinned, context); });
}

int copy_batch(const char* call, const Address* to, const Address* from, const std::size_t* bytes, std::size_t count,
               const std::size_t* attribute_index, std::size_t attribute_count, void* handle) {
  const std::lock_guard lock(state().mutex);
  int code = 0;
  Stream* stream = enter_stream(call, std::to_string(count), handle, code);
  if (stream == nullptr) return code;
  const bool right = count > 0 && attribute_count > 0 && attribute_count <= count && attribute_index[0] == 0;
  if (!right || reinterpret_cast<std::uintptr_t>(handle) <= 1) return kInvalidValue;
  for (std::size_t i = 0; i < count; ++i) {
    const Copy copy{to[i], from[i], bytes[i]};
    if (bytes[i] == 0 || !can_copy(copy, stream->context->device)) return kInvalidValue;
    count_pageable(copy);
  }
  if (stream->captured) return kSuccess;
  // In stream order as a whole, and in any order within: here backwards.
  for (std::size_t i = count; i-- > 0;) add_copy(stream, {to[i], from[i], bytes[i]});
  return kSuccess;
}

}  // namespace
}  // namespace kvpool::fake_cuda

using namespace kvpool::fake_cuda;

extern "C" {

int cuMemcpyAsync(Address to, Address from, std::size_t bytes, void* handle) {
  const std::lock_guard lock(state().mutex);
  int code = 0;
  Stream* stream = enter_stream("cuMemcpyAsync", std::to_string(bytes), handle, code);
  if (stream == nullptr) return code;
  const Copy copy{to, from, bytes};
  if (!can_copy(copy, stream->context->device)) return kInvalidValue;
  count_pageable(copy);
  if (stream->captured) return kSuccess;
  add_copy(stream, copy);
  return kSuccess;
}

int cuMemcpyBatchAsync(Address* to, Address* from, std::size_t* bytes, std::size_t count, void* /*attributes*/,
                       std::size_t* attribute_index, std::size_t attribute_count, std::size_t* failed, void* stream) {
  const int code = copy_batch("cuMemcpyBatchAsync", to, from, bytes, count, attribute_index, attribute_count, stream);
  if (code != kSuccess) *failed = 0;
  return code;
}

int cuMemcpyBatchAsync_v2(Address* to, Address* from, std::size_t* bytes, std::size_t count, void* /*attributes*/,
                          std::size_t* attribute_index, std::size_t attribute_count, void* stream) {
  return copy_batch("cuMemcpyBatchAsync_v2", to, from, bytes, count, attribute_index, attribute_count, stream);
}

int cuMemsetD8Async(Address to, unsigned char value, std::size_t bytes, void* handle) {
  const std::lock_guard lock(state().mutex);
  int code = 0;
  Stream* stream = enter_stream("cuMemsetD8Async", std::to_string(bytes), handle, code);
  if (stream == nullptr) return code;
  if (!on_device(to) || host_address(to, bytes, stream->context->device) == nullptr) return kInvalidValue;
  stream->add([to, value, bytes, context = stream->context] {
    std::byte* at = nullptr;
    std::shared_ptr<Physical> keep;
    {
      const std::lock_guard inner(state().mutex);
      if (context->lost != 0) return;
      at = host_address(to, bytes, context->device);
      if (at == nullptr) return break_context(context);
      keep = physical_at(to);
    }
    std::memset(at, value, bytes);
  });
  return kSuccess;
}

}  // extern "C"
