// What this build and this machine are.
#include <pybind11/pybind11.h>

#include "bind.h"
#include "kvpool/arena/arena.h"

namespace kvpool::bindings {

namespace py = pybind11;

void bind_machine(py::module_& module) {
  module.def(
      "memory_headroom",
      [] {
        const MemoryHeadroom headroom = memory_headroom();
        return py::make_tuple(headroom.available_bytes, headroom.limit);
      },
      "(bytes that can be committed now, the limit that says so).");
  module.def(
      "build_info",
      [] {
        py::dict info;
        info["compiler"] = KVPOOL_COMPILER;
        info["build_type"] = KVPOOL_BUILD_TYPE;
        info["cuda_compiler"] = KVPOOL_CUDA_COMPILER_VERSION;
        return info;
      },
      "How this extension was built.");
}

}  // namespace kvpool::bindings
