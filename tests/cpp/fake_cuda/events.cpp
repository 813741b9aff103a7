// The fake driver's events.
#include "state.h"

namespace kvpool::fake_cuda {

Event* event_of(const char* call, void* handle) {
  const auto found = state().events.find(reinterpret_cast<std::uintptr_t>(handle));
  if (found == state().events.end()) undefined(call, "the event was never made, or was destroyed");
  return found->second;
}

}  // namespace kvpool::fake_cuda

using namespace kvpool::fake_cuda;

extern "C" {

int cuEventCreate(void** handle, unsigned flags) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  int code = 0;
  Context* context = enter_context("cuEventCreate", "", code);
  if (context == nullptr) return code;
  if (flags > 7) return kInvalidValue;
  s.next_object += 16;
  s.events[s.next_object] = new Event{context, {}, false};
  *handle = reinterpret_cast<void*>(s.next_object);  // NOLINT(performance-no-int-to-ptr)
  return kSuccess;
}

// Earlier waits for the event stay.
int cuEventDestroy_v2(void* handle) {
  const std::lock_guard lock(state().mutex);
  const int code = enter("cuEventDestroy", "");
  if (code != kSuccess) return code;
  delete event_of("cuEventDestroy", handle);
  state().events.erase(reinterpret_cast<std::uintptr_t>(handle));
  return kSuccess;
}

// Waits for the earlier record still wait for that.
int cuEventRecord(void* raw_event, void* handle) {
  const std::lock_guard lock(state().mutex);
  int code = 0;
  Stream* stream = enter_stream("cuEventRecord", "", handle, code);
  if (stream == nullptr) return code;
  if (event_of("cuEventRecord", raw_event)->context != stream->context) return kInvalidHandle;
  const bool captured = stream->captured;
  std::vector<std::shared_ptr<Mark>> marks;
  if (!captured) marks = {stream->add_mark()};
  Event* const event = event_of("cuEventRecord", raw_event);  // the lock may have been released
  event->marks = std::move(marks);
  event->captured = captured;
  return kSuccess;
}

// All that the context's streams have now.
int cuCtxRecordEvent(void* handle, void* raw_event) {
  const std::lock_guard lock(state().mutex);
  const int code = enter("cuCtxRecordEvent", "");
  if (code != kSuccess) return code;
  const auto* context = static_cast<Context*>(handle);
  Event* const event = event_of("cuCtxRecordEvent", raw_event);
  if (event->context != context) return kInvalidHandle;
  if (context->lost != 0) return context->lost;
  event->marks = ends_of_now([context](const Stream& stream) { return stream.context == context; });
  event->captured = false;
  return kSuccess;
}

int cuStreamWaitEvent(void* handle, void* raw_event, unsigned flags) {
  const std::lock_guard lock(state().mutex);
  int code = 0;
  Stream* stream = enter_stream("cuStreamWaitEvent", "", handle, code);
  if (stream == nullptr) return code;
  const Event* const event = event_of("cuStreamWaitEvent", raw_event);
  if (flags != 0) return kInvalidValue;
  // The stream is pulled into the capture.
  if (event->captured) stream->captured = true;
  const auto marks = event->marks;
  for (const auto& mark : marks) stream->add([mark] { wait_for(mark); });
  return kSuccess;
}

int cuEventQuery(void* raw_event) {
  std::vector<std::shared_ptr<Mark>> marks;
  {
    const std::lock_guard lock(state().mutex);
    int code = 0;
    if (enter_context("cuEventQuery", "", code) == nullptr) return code;
    const Event* const event = event_of("cuEventQuery", raw_event);
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

}  // extern "C"
