// The fake driver's streams: each is a thread, and every piece of its work waits a little before it begins.
#include <chrono>
#include <cstring>
#include <random>

#include "state.h"

namespace kvpool::fake_cuda {
namespace {

void run(Stream* stream) {
  std::minstd_rand dice(static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(stream) >> 4));
  for (;;) {
    std::function<void()> work;
    {
      std::unique_lock lock(stream->mutex);
      stream->changed.wait(lock, [&] { return stream->ended || !stream->queue.empty(); });
      if (stream->queue.empty()) return;
      work = std::move(stream->queue.front());
      stream->queue.pop_front();
    }
    int delay_us = 0;
    {
      const std::lock_guard lock(state().mutex);
      delay_us = state().settings.at("delay_us");
    }
    if (delay_us > 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(delay_us / 2 + static_cast<int>(dice()) % (delay_us + 1)));
    }
    work();
  }
}

// The stream that a handle names in this context, or null. REQUIRES: the lock.
Stream* stream_from(void* handle, Context* context) {
  State& s = state();
  const auto number = reinterpret_cast<std::uintptr_t>(handle);
  const bool one_queue = s.settings.at("one_queue") != 0;
  if (number <= 2 || one_queue) {
    // 0 and 1 are the same stream.
    Stream*& stream = context->defaults[number == 2 && !one_queue ? 2 : 1];
    if (stream == nullptr) {
      stream = new Stream(context);
      s.streams.insert(stream);
    }
    return stream;
  }
  auto* stream = static_cast<Stream*>(handle);
  return s.streams.contains(stream) ? stream : nullptr;
}

// What work does when its memory has gone meanwhile.
void break_context(Context* context) {
  if (context->lost == 0) context->lost = kIllegalAddress;
}

struct Copy {
  Address to;
  Address from;
  std::size_t bytes;
};

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
// TSan sees.
void copy_now(const Copy& copy, Context* context) {
  std::byte* to = nullptr;
  std::byte* from = nullptr;
  std::shared_ptr<Physical> keep[2];
  {
    State& s = state();
    const std::lock_guard lock(s.mutex);
    if (context->lost != 0) return;
    to = host_address(copy.to, copy.bytes, context->device);
    from = host_address(copy.from, copy.bytes, context->device);
    if (to == nullptr || from == nullptr) return break_context(context);
    keep[0] = physical_at(copy.to);
    keep[1] = physical_at(copy.from);
    ++s.counts["copied"];
  }
  std::memmove(to, from, copy.bytes);
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
  for (std::size_t i = count; i-- > 0;) {
    const Copy copy{to[i], from[i], bytes[i]};
    stream->add([copy, context = stream->context] { copy_now(copy, context); });
  }
  return kSuccess;
}

}  // namespace

Stream* enter_stream(const char* call, const std::string& argument, void* handle, int& code) {
  Context* context = enter_context(call, argument, code);
  if (context == nullptr) return nullptr;
  Stream* stream = stream_from(handle, context);
  if (stream == nullptr) {
    code = kInvalidHandle;
  } else if (stream->context != context) {
    code = kInvalidContext;
  } else {
    return stream;
  }
  return nullptr;
}

Stream::Stream(Context* of) : context(of), thread([this] { run(this); }) {}

Stream::~Stream() {
  {
    const std::lock_guard lock(mutex);
    ended = true;
  }
  changed.notify_all();
  thread.join();
}

void Stream::add(std::function<void()> work) {
  {
    const std::lock_guard lock(mutex);
    queue.push_back(std::move(work));
  }
  changed.notify_all();
}

std::shared_ptr<Mark> Stream::add_mark() {
  auto mark = std::make_shared<Mark>();
  add([mark] {
    {
      const std::lock_guard lock(mark->mutex);
      mark->done = true;
    }
    mark->done_changed.notify_all();
  });
  return mark;
}

void wait_for(const std::shared_ptr<Mark>& mark) {
  std::unique_lock lock(mark->mutex);
  mark->done_changed.wait(lock, [&] { return mark->done; });
}

void wait_for_device(std::unique_lock<std::mutex>& lock, int device) {
  if (state().settings.at("unmap_waits") == 0) return;
  std::vector<std::shared_ptr<Mark>> marks;
  for (Stream* stream : state().streams) {
    if (stream->context->device == device) marks.push_back(stream->add_mark());
  }
  lock.unlock();
  for (const auto& mark : marks) wait_for(mark);
  lock.lock();
}

}  // namespace kvpool::fake_cuda

using namespace kvpool::fake_cuda;

extern "C" {

int cuStreamCreate(void** handle, unsigned /*flags*/) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  int code = 0;
  Context* context = enter_context("cuStreamCreate", "", code);
  if (context == nullptr) return code;
  auto* stream = new Stream(context);
  s.streams.insert(stream);
  *handle = stream;
  return kSuccess;
}

int cuStreamDestroy_v2(void* handle) {
  State& s = state();
  Stream* stream = nullptr;
  int code = 0;
  {
    const std::lock_guard lock(s.mutex);
    code = enter("cuStreamDestroy", "");
    if (code != kSuccess) return code;
    stream = static_cast<Stream*>(handle);
    if (s.streams.erase(stream) == 0) return kInvalidHandle;
    code = stream->context->lost;
  }
  delete stream;  // its work may need the lock
  return code;
}

int cuStreamSynchronize(void* handle) {
  std::shared_ptr<Mark> mark;
  Context* context = nullptr;
  {
    const std::lock_guard lock(state().mutex);
    int code = 0;
    Stream* stream = enter_stream("cuStreamSynchronize", "", handle, code);
    if (stream == nullptr) return code;
    if (stream->captured) {
      ++state().counts["captures broken"];
      return kCaptureUnsupported;
    }
    context = stream->context;
    mark = stream->add_mark();
  }
  wait_for(mark);
  const std::lock_guard lock(state().mutex);
  return context->lost;
}

int cuCtxSynchronize() {
  std::vector<std::shared_ptr<Mark>> marks;
  Context* context = nullptr;
  {
    const std::lock_guard lock(state().mutex);
    int code = 0;
    context = enter_context("cuCtxSynchronize", "", code);
    if (context == nullptr) return code;
    for (Stream* stream : state().streams) {
      if (stream->context == context) marks.push_back(stream->add_mark());
    }
  }
  for (const auto& mark : marks) wait_for(mark);
  const std::lock_guard lock(state().mutex);
  return context->lost;
}

int cuStreamGetCtx(void* handle, void** context) {
  const std::lock_guard lock(state().mutex);
  int code = 0;
  Context* current = enter_context("cuStreamGetCtx", "", code);
  if (current == nullptr) return code;
  const Stream* stream = stream_from(handle, current);
  if (stream == nullptr) return kInvalidHandle;
  *context = stream->context;
  return kSuccess;
}

int cuStreamBeginCapture_v2(void* handle, int /*mode*/) {
  const std::lock_guard lock(state().mutex);
  int code = 0;
  Stream* stream = enter_stream("cuStreamBeginCapture", "", handle, code);
  if (stream != nullptr) stream->captured = true;
  return code;
}

int cuStreamIsCapturing(void* handle, int* status) {
  const std::lock_guard lock(state().mutex);
  int code = 0;
  const Stream* stream = enter_stream("cuStreamIsCapturing", "", handle, code);
  if (stream != nullptr) *status = stream->captured ? 1 : 0;
  return code;
}

// Of all streams: the fake has one capture at a time, and no graphs.
int cuStreamEndCapture(void* handle, void** graph) {
  const std::lock_guard lock(state().mutex);
  int code = 0;
  if (enter_stream("cuStreamEndCapture", "", handle, code) == nullptr) return code;
  for (Stream* stream : state().streams) stream->captured = false;
  *graph = nullptr;
  return kSuccess;
}

int cuStreamWaitEvent(void* handle, void* raw_event, unsigned flags) {
  const std::lock_guard lock(state().mutex);
  int code = 0;
  Stream* stream = enter_stream("cuStreamWaitEvent", "", handle, code);
  if (stream == nullptr) return code;
  auto* event = static_cast<Event*>(raw_event);
  if (!state().events.contains(event) || flags != 0) return kInvalidHandle;
  // The stream is pulled into the capture.
  if (event->captured) stream->captured = true;
  for (const auto& mark : event->marks) stream->add([mark] { wait_for(mark); });
  return kSuccess;
}

int cuEventCreate(void** handle, unsigned /*flags*/) {
  const std::lock_guard lock(state().mutex);
  int code = 0;
  Context* context = enter_context("cuEventCreate", "", code);
  if (context == nullptr) return code;
  auto* event = new Event{context, {}, false};
  state().events.insert(event);
  *handle = event;
  return kSuccess;
}

int cuEventDestroy_v2(void* handle) {
  const std::lock_guard lock(state().mutex);
  const int code = enter("cuEventDestroy", "");
  if (code != kSuccess) return code;
  auto* event = static_cast<Event*>(handle);
  if (state().events.erase(event) == 0) return kInvalidHandle;
  delete event;
  return kSuccess;
}

int cuEventRecord(void* raw_event, void* handle) {
  const std::lock_guard lock(state().mutex);
  int code = 0;
  Stream* stream = enter_stream("cuEventRecord", "", handle, code);
  if (stream == nullptr) return code;
  auto* event = static_cast<Event*>(raw_event);
  if (!state().events.contains(event) || event->context != stream->context) return kInvalidHandle;
  event->marks.clear();
  event->captured = stream->captured;
  if (!event->captured) event->marks = {stream->add_mark()};
  return kSuccess;
}

// All that the context's streams have now.
int cuCtxRecordEvent(void* handle, void* raw_event) {
  const std::lock_guard lock(state().mutex);
  const int code = enter("cuCtxRecordEvent", "");
  if (code != kSuccess) return code;
  auto* context = static_cast<Context*>(handle);
  auto* event = static_cast<Event*>(raw_event);
  if (!state().events.contains(event) || event->context != context) return kInvalidHandle;
  if (context->lost != 0) return context->lost;
  event->marks.clear();
  event->captured = false;
  for (Stream* stream : state().streams) {
    if (stream->context == context) event->marks.push_back(stream->add_mark());
  }
  return kSuccess;
}

int cuEventQuery(void* raw_event) {
  std::vector<std::shared_ptr<Mark>> marks;
  {
    const std::lock_guard lock(state().mutex);
    int code = 0;
    if (enter_context("cuEventQuery", "", code) == nullptr) return code;
    auto* event = static_cast<Event*>(raw_event);
    if (!state().events.contains(event)) return kInvalidHandle;
    if (event->captured) {
      ++state().counts["captures broken"];
      return kCapturedEvent;
    }
    marks = event->marks;
  }
  for (const auto& mark : marks) {
    const std::lock_guard lock(mark->mutex);
    if (!mark->done) return kNotReady;
  }
  return kSuccess;
}

int cuMemcpyAsync(Address to, Address from, std::size_t bytes, void* handle) {
  const std::lock_guard lock(state().mutex);
  int code = 0;
  Stream* stream = enter_stream("cuMemcpyAsync", std::to_string(bytes), handle, code);
  if (stream == nullptr) return code;
  const Copy copy{to, from, bytes};
  if (!can_copy(copy, stream->context->device)) return kInvalidValue;
  count_pageable(copy);
  if (stream->captured) return kSuccess;
  stream->add([copy, context = stream->context] { copy_now(copy, context); });
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

int cuLaunchHostFunc(void* handle, void (*function)(void*), void* argument) {
  const std::lock_guard lock(state().mutex);
  int code = 0;
  Stream* stream = enter_stream("cuLaunchHostFunc", "", handle, code);
  if (stream == nullptr) return code;
  stream->add([function, argument] { function(argument); });
  return kSuccess;
}

}  // extern "C"
