#include "events.h"

#include <pybind11/numpy.h>

#include <cstring>

#include "arguments.h"
#include "bind.h"

namespace kvpool::bindings {
namespace {

py::object tokens_array(const std::vector<Token>& tokens) {
  py::array_t<Token> array(static_cast<py::ssize_t>(tokens.size()));
  if (!tokens.empty()) std::memcpy(array.mutable_data(), tokens.data(), tokens.size() * sizeof(Token));
  return array;
}

// (lost, [(kind, sequence, namespace, tokens, first_block, addrs, old_addrs), ...])
py::tuple drain(EventSource& source) {
  if (source.queue == nullptr) throw Error(ErrorCode::kClosed, "the event stream is closed");
  const EventQueue::Batch batch = source.drain(*source.queue);
  py::list events;
  for (const auto& event : batch.events) {
    events.append(py::make_tuple(static_cast<int>(event->kind), event->sequence, event->name_space,
                                 tokens_array(event->tokens), event->first_page,
                                 to_array(event->values.data(), event->values.size()),
                                 to_array(event->old_values.data(), event->old_values.size())));
  }
  return py::make_tuple(batch.lost, events);
}

void close(EventSource& source) {
  if (source.queue == nullptr) return;
  source.unsubscribe(source.queue);
  source = EventSource{};
}

}  // namespace

void bind_events(py::module_& module) {
  py::class_<EventSource>(module, "EventSource", "A subscription; see kvpool.EventStream.")
      .def("drain", &drain)
      .def("close", &close);
}

}  // namespace kvpool::bindings
