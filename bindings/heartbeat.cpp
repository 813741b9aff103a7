// The sign of life of a process, for the membership of a cluster.
#include "kvpool/base/heartbeat.h"

#include <pybind11/pybind11.h>

#include <cmath>
#include <cstdint>
#include <memory>

#include "bind.h"
#include "gil.h"

namespace kvpool::bindings {

namespace py = pybind11;

namespace {

std::int64_t ns_from(double seconds) {
  if (!(seconds >= 1e-6 && seconds <= 1e6)) throw Error(ErrorCode::kArgument, "heartbeat: a time is out of range");
  return static_cast<std::int64_t>(std::llround(seconds * 1e9));
}

std::unique_ptr<Heartbeat> make(int descriptor, double interval_s, double lease_s) {
  const std::int64_t interval_ns = ns_from(interval_s);
  const std::int64_t lease_ns = ns_from(lease_s);
  if (interval_ns >= lease_ns)
    throw Error(ErrorCode::kArgument, "heartbeat: the interval must be shorter than the lease");
  return std::make_unique<Heartbeat>(descriptor, interval_ns, lease_ns);
}

}  // namespace

void bind_heartbeat(py::module_& module) {
  py::class_<Heartbeat>(
      module, "Heartbeat",
      "A thread that writes the time into a page of shared memory, whatever the interpreter is doing.")
      .def(py::init(&make), py::arg("descriptor"), py::arg("interval_s"), py::arg("lease_s"))
      .def("stop", &Heartbeat::stop, py::call_guard<GilReleased>(), "Ends the thread; the last beat stays. Idempotent.")
      .def_property_readonly("beat_ns", &Heartbeat::beat_ns, "CLOCK_MONOTONIC of the last beat.")
      .def_property_readonly("lapses", &Heartbeat::lapses, "How often two beats were further apart than the lease.")
      .def_property_readonly("fresh", &Heartbeat::fresh, "Whether the last beat is younger than the lease.");
}

}  // namespace kvpool::bindings
