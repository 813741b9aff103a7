// The fake driver's streams: each is a thread, and every piece of its work waits a little before it begins.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>

#include "state.h"

namespace kvpool::fake_cuda {
namespace {

constexpr unsigned kNonBlocking = 1;

// From 2 on.
int number_of_thread() {
  static std::atomic<int> last{1};
  thread_local const int number = ++last;
  return number;
}

void nap(std::minstd_rand& dice) {
  int delay_us = 0;
  {
    const std::lock_guard lock(state().mutex);
    delay_us = state().settings.at("delay_us");
  }
  if (delay_us > 0) {
    std::this_thread::sleep_for(std::chrono::microseconds(delay_us / 2 + static_cast<int>(dice()) % (delay_us + 1)));
  }
}

void run(Stream* stream) {
  std::minstd_rand dice(static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(stream) >> 4));
  for (;;) {
    std::function<void()> work;
    {
      std::unique_lock lock(stream->mutex);
      stream->changed.wait(lock, [&] { return stream->ended || !stream->queue.empty(); });
      if (stream->queue.empty()) break;
      work = std::move(stream->queue.front());
      stream->queue.pop_front();
    }
    nap(dice);
    work();
    work = nullptr;
    {
      const std::lock_guard lock(stream->mutex);
      --stream->pending;
    }
    stream->changed.notify_all();
  }
  const std::lock_guard lock(state().mutex);
  state().working.erase(stream);
  state().stopped.notify_all();
}

}  // namespace

void undefined(const std::string& call, const std::string& what) {
  std::fprintf(stderr, "fake CUDA driver: %s: %s; on a real driver the behaviour is undefined\n", call.c_str(),
               what.c_str());
  std::abort();
}

Stream* stream_of(const char* call, void* handle, Context* context) {
  State& s = state();
  const auto number = reinterpret_cast<std::uintptr_t>(handle);
  const auto found = s.streams.find(number);
  if (number > 2 && found == s.streams.end()) {
    undefined(call, number < s.next_object && number >= 0x10000 && number % 16 == 0
                        ? "the stream was destroyed, or is an event"
                        : "the stream was never made");
  }
  const bool one_queue = s.settings.at("one_queue") != 0;
  if (number > 2 && !one_queue) return found->second;
  // 0 and 1 are the same stream, and 2 is another one in each thread.
  Stream*& stream = context->defaults[number == 2 && !one_queue ? number_of_thread() : 1];
  if (stream == nullptr) stream = new Stream(context, true);
  return stream;
}

Stream* enter_stream(const char* call, const std::string& argument, void* handle, int& code) {
  Context* context = enter_context(call, argument, code);
  if (context == nullptr) return nullptr;
  Stream* stream = stream_of(call, handle, context);
  if (stream->context != context) {
    code = kInvalidContext;
    return nullptr;
  }
  // The legacy stream would wait for captured work.
  const bool legacy = reinterpret_cast<std::uintptr_t>(handle) <= 1;
  for (const Stream* other : state().working) {
    if (legacy && other != stream && other->context == context && other->blocking && other->captured) {
      ++state().counts["captures broken"];
      code = kCaptureImplicit;
      return nullptr;
    }
  }
  return stream;
}

Stream::Stream(Context* of, bool blocks) : context(of), blocking(blocks) {
  state().all_streams.emplace_back(this);
  state().working.insert(this);
  std::thread([this] { run(this); }).detach();
}

void Stream::push(std::function<void()> work) {
  {
    const std::lock_guard lock(mutex);
    queue.push_back(std::move(work));
    ++pending;
  }
  changed.notify_all();
}

void Stream::wait_for_room() {
  const auto has_room = [this] { return pending < kPendingMax; };
  {
    const std::lock_guard own(mutex);
    if (has_room()) return;
  }
  ++state().counts["callers held up"];
  state().mutex.unlock();
  {
    std::unique_lock own(mutex);
    changed.wait(own, has_room);
  }
  state().mutex.lock();
}

void Stream::follow_implicitly() {
  const auto legacy = context->defaults.find(1);
  if (!blocking || legacy == context->defaults.end()) return;
  std::vector<Stream*> others;
  if (legacy->second != this) {
    others = {legacy->second};
  } else {
    for (Stream* stream : state().working) {
      if (stream != this && stream->context == context && stream->blocking) others.push_back(stream);
    }
  }
  for (Stream* other : others) {
    if (const auto mark = other->end_of_now()) push([mark] { wait_for(mark); });
  }
}

void Stream::add(std::function<void()> work) {
  wait_for_room();
  follow_implicitly();
  push(std::move(work));
}

std::shared_ptr<Mark> Stream::push_mark() {
  auto mark = std::make_shared<Mark>();
  queue.emplace_back([mark] {
    {
      const std::lock_guard lock(mark->mutex);
      mark->done = true;
    }
    mark->done_changed.notify_all();
  });
  ++pending;
  return mark;
}

std::shared_ptr<Mark> Stream::end_of_now() {
  std::shared_ptr<Mark> mark;
  {
    // Under one hold of the lock: between a look and a push the stream's thread may do its last work and end.
    const std::lock_guard own(mutex);
    if (pending == 0) return nullptr;
    mark = push_mark();
  }
  changed.notify_all();
  return mark;
}

std::shared_ptr<Mark> Stream::add_mark() {
  wait_for_room();
  follow_implicitly();
  std::shared_ptr<Mark> mark;
  {
    const std::lock_guard own(mutex);
    mark = push_mark();
  }
  changed.notify_all();
  return mark;
}

void wait_for(const std::shared_ptr<Mark>& mark) {
  std::unique_lock lock(mark->mutex);
  mark->done_changed.wait(lock, [&] { return mark->done; });
}

std::vector<std::shared_ptr<Mark>> ends_of_now(const std::function<bool(const Stream&)>& chosen) {
  std::vector<std::shared_ptr<Mark>> marks;
  for (Stream* stream : state().working) {
    if (!chosen(*stream)) continue;
    if (auto mark = stream->end_of_now()) marks.push_back(std::move(mark));
  }
  return marks;
}

std::vector<std::shared_ptr<Mark>> ends_on(int device) {
  if (state().held.contains(device)) ++state().counts["waits behind words"];
  return ends_of_now([device](const Stream& stream) { return stream.context->device == device; });
}

void wait_for_device(std::unique_lock<std::mutex>& lock, int device) {
  const auto marks = ends_on(device);
  lock.unlock();
  for (const auto& mark : marks) wait_for(mark);
  lock.lock();
}

void wait_to_unmap(std::unique_lock<std::mutex>& lock, int device) {
  if (state().settings.at("unmap_waits") != 0) wait_for_device(lock, device);
}

}  // namespace kvpool::fake_cuda

using namespace kvpool::fake_cuda;

extern "C" {

int cuStreamCreate(void** handle, unsigned flags) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  int code = 0;
  Context* context = enter_context("cuStreamCreate", "", code);
  if (context == nullptr) return code;
  if (flags > kNonBlocking) return kInvalidValue;
  s.next_object += 16;
  s.streams[s.next_object] = new Stream(context, flags != kNonBlocking);
  *handle = reinterpret_cast<void*>(s.next_object);  // NOLINT(performance-no-int-to-ptr)
  return kSuccess;
}

// Returns at once; the stream's work goes on.
int cuStreamDestroy_v2(void* handle) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const int code = enter("cuStreamDestroy", "");
  if (code != kSuccess) return code;
  const auto found = s.streams.find(reinterpret_cast<std::uintptr_t>(handle));
  if (found == s.streams.end()) undefined("cuStreamDestroy", "the stream was never made, or was destroyed before");
  Stream* const stream = found->second;
  s.streams.erase(found);
  {
    const std::lock_guard own(stream->mutex);
    stream->ended = true;
  }
  stream->changed.notify_all();
  return stream->context->lost;
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
  std::unique_lock lock(state().mutex);
  int code = 0;
  const Context* context = enter_context("cuCtxSynchronize", "", code);
  if (context == nullptr) return code;
  wait_for_device(lock, context->device);
  return context->lost;
}

// As a call that loads a module into a GPU, such as NCCL's initialisation: waits for all work of the GPU.
void fake_cuda_load_module(int device) {
  std::unique_lock lock(state().mutex);
  ++state().counts["modules loaded"];
  wait_for_device(lock, device);
}

int cuStreamGetCtx(void* handle, void** context) {
  const std::lock_guard lock(state().mutex);
  int code = 0;
  Context* current = enter_context("cuStreamGetCtx", "", code);
  if (current == nullptr) return code;
  Stream* stream = stream_of("cuStreamGetCtx", handle, current);
  // Of a stream of a green context it is what cuCtxFromGreenCtx makes of that.
  *context = stream->green ? static_cast<void*>(stream) : stream->context;
  return kSuccess;
}

int cuStreamGetCtx_v2(void* handle, void** context, void** green) {
  const std::lock_guard lock(state().mutex);
  int code = 0;
  Context* current = enter_context("cuStreamGetCtx_v2", "", code);
  if (current == nullptr) return code;
  Stream* stream = stream_of("cuStreamGetCtx_v2", handle, current);
  *context = stream->context;
  *green = stream->green ? static_cast<void*>(stream) : nullptr;
  return kSuccess;
}

// As if cuGreenCtxStreamCreate had made the stream, in a green context of the same GPU.
void fake_cuda_make_green(void* handle) {
  const std::lock_guard lock(state().mutex);
  stream_of("fake_cuda_make_green", handle, nullptr)->green = true;
}

int cuStreamBeginCapture_v2(void* handle, int /*mode*/) {
  const std::lock_guard lock(state().mutex);
  int code = 0;
  Stream* stream = enter_stream("cuStreamBeginCapture", "", handle, code);
  if (stream == nullptr) return code;
  if (reinterpret_cast<std::uintptr_t>(handle) <= 1) return kCaptureUnsupported;  // not the legacy stream
  stream->captured = true;
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
  for (Stream* stream : state().working) stream->captured = false;
  *graph = nullptr;
  return kSuccess;
}

int cuLaunchHostFunc(void* handle, void (*function)(void*), void* argument) {
  const std::lock_guard lock(state().mutex);
  int code = 0;
  Stream* stream = enter_stream("cuLaunchHostFunc", "", handle, code);
  if (stream == nullptr) return code;
  stream->add([function, argument] {
    in_host_function = true;
    function(argument);
    in_host_function = false;
  });
  return kSuccess;
}

}  // extern "C"
