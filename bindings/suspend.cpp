// HBM that an engine takes back for a while.
#include <pybind11/pybind11.h>

#include "arguments.h"
#include "bind.h"
#include "kvpool/pool/pool.h"
#include "node.h"
#include "service.h"
#include "stream.h"

namespace kvpool::bindings {
namespace {

namespace py = pybind11;

std::size_t suspend(PeerNode& node, py::handle keep_argument, py::handle timeout, py::handle stream_argument) {
  const bool keep = flag_from(keep_argument, "keep");
  const std::int64_t deadline = deadline_from(timeout, node.timeout_ns());
  const CallerStream stream = stream_from(stream_argument);
  return call_interruptibly(
      [&](const GivenUp& given_up) { return node.pool().suspend(keep, {deadline, given_up}, stream); });
}

}  // namespace

void bind_suspend(PoolClass& pool) {
  pool.def("_suspend", &suspend, py::arg("keep"), py::arg("timeout"), py::arg("stream"))
      .def(
          "resume", of_pool([](Pool& pool) { pool.resume(); }),
          R"(Says that the memory which `suspend` gave up is there again: blocks of HBM can be had from now on. Thread-safe.

It is at the same addresses as before, and may have any content: nothing of it is cached, and addresses of blocks from
before stay stale.

Raises:
    StateError: HBM is not suspended.)")
      .def_property_readonly("suspended", of_pool([](Pool& pool) { return pool.suspended(); }),
                             "Whether HBM is suspended: from the end of `suspend` to `resume`.");
}

}  // namespace kvpool::bindings
