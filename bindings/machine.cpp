// What this build and this machine are.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <tuple>

#include "bind.h"
#include "gil.h"
#include "kvpool/arena/arena.h"
#include "kvpool/cuda/copy_bounds.h"
#include "kvpool/cuda/kernels.h"
#include "kvpool/routes/nccl/nccl_cost.h"
#include "kvpool/routes/ucx/ucx.h"

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
        info["cuda_kernels"] = cuda::kernel_targets();
        info["sources"] = kSourcesDigest;
        return info;
      },
      "How this extension was built.");
  module.def(
      "kernel_piece_bytes",
      [](int gpu) -> std::optional<std::tuple<std::size_t, std::size_t, std::size_t>> {
        const auto bounds = known_copy_bounds(gpu);
        if (!bounds) return std::nullopt;
        return std::tuple(bounds->of(GpuWay::kOut), bounds->of(GpuWay::kIn), bounds->of(GpuWay::kWithin));
      },
      py::arg("gpu"),
      "Mean length of pieces up to which kernels copy: out of this GPU, into it, within it. None: not measured.");
  module.def(
      "nccl_cost",
      [](int gpu) {
        const NcclCost cost = nccl_cost(gpu);
        return std::tuple(cost.communicators, cost.library_bytes, cost.staging_bytes);
      },
      py::arg("gpu"), "What NCCL takes of this GPU's memory in this process: communicators, NCCL's bytes, kvpool's.");
  module.def("describe_ucx", &describe_ucx, py::arg("where"), py::call_guard<GilReleased>(),
             "Opens the UCX there: its version, and the file. Raises Unsupported.");
  module.def("probe_ucx_lanes", &probe_ucx_lanes, py::arg("where"), py::call_guard<GilReleased>(),
             "The lanes by which UCX reaches another process on this host. Raises Unsupported.");
}

}  // namespace kvpool::bindings
