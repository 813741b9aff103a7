// Reshard plans for kvpool.transfer: shapes and configurations in as tuples, slices and strips out.
#include "reshard.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "arguments.h"
#include "bind.h"

namespace kvpool::bindings {
namespace {

// What is above 32 bits becomes the largest number, which the core then refuses with its range.
std::uint32_t number_from(py::handle argument, const char* name) {
  return static_cast<std::uint32_t>(
      std::min<std::size_t>(count_from(argument, name), std::numeric_limits<std::uint32_t>::max()));
}

LayerSplit split_from(const std::string& name) {
  if (name == "vllm") return LayerSplit::kVllm;
  if (name == "sglang") return LayerSplit::kSglang;
  throw Error(ErrorCode::kArgument, "split must be vllm or sglang, and is " + name);
}

DType dtype_from(const std::string& name) {
  if (const auto dtype = dtype_named(name)) return *dtype;
  throw Error(ErrorCode::kArgument, "there is no element type " + name);
}

}  // namespace

KVShape shape_from(const py::tuple& shape) {
  KVShape numbers;
  numbers.layers = number_from(shape[0], "layers");
  numbers.kv_heads = number_from(shape[1], "kv_heads");
  numbers.head_dim = number_from(shape[2], "head_dim");
  numbers.dtype = dtype_from(py::cast<std::string>(shape[3]));
  numbers.block_tokens = number_from(shape[4], "block_tokens");
  numbers.tokens_first = py::cast<bool>(shape[5]);
  numbers.fused = py::cast<bool>(shape[6]);
  return numbers;
}

Sharding sharding_from(const py::tuple& shape, const py::tuple& parallel) {
  Parallel configuration;
  configuration.tp = number_from(parallel[0], "tp");
  configuration.pp = number_from(parallel[1], "pp");
  configuration.split = split_from(py::cast<std::string>(parallel[2]));
  for (const py::handle layers : py::cast<py::sequence>(parallel[3])) {
    configuration.stage_layers.push_back(number_from(layers, "stage_layers"));
  }
  return {shape_from(shape), configuration};
}

namespace {

py::array_t<std::uint64_t> strip_rows(const std::vector<BlockStrip>& strips) {
  static_assert(sizeof(BlockStrip) == 3 * sizeof(std::uint64_t));
  py::array_t<std::uint64_t> rows({static_cast<py::ssize_t>(strips.size()), py::ssize_t{3}});
  if (!strips.empty()) std::memcpy(rows.mutable_data(), strips.data(), strips.size() * sizeof(BlockStrip));
  return rows;
}

py::list rank_slices(const py::tuple& shape, const py::tuple& parallel) {
  const Sharding sharding = sharding_from(shape, parallel);
  py::list slices(sharding.ranks());
  for (std::uint32_t rank = 0; rank < sharding.ranks(); ++rank) {
    const RankSlice slice = sharding.slice(rank);
    slices[rank] = py::make_tuple(slice.rank, slice.stage, slice.tp_rank, slice.layer_first, slice.layers,
                                  slice.head_first, slice.heads, slice.replica, slice.replicas);
  }
  return slices;
}

py::list plan(const py::tuple& from_shape, const py::tuple& from, const py::tuple& to_shape, const py::tuple& to) {
  const ReshardPlan plan = plan_reshard(sharding_from(from_shape, from), sharding_from(to_shape, to));
  py::list pairs(plan.pairs.size());
  for (std::size_t i = 0; i < plan.pairs.size(); ++i) {
    const ReshardPair& pair = plan.pairs[i];
    pairs[i] = py::make_tuple(pair.from_rank, pair.to_rank, pair.bytes, strip_rows(pair.strips));
  }
  return pairs;
}

// Strips that came from plan_reshard, so that they rise; numbers that do not are clipped to something useless, not to
// something unsafe.
py::array_t<std::uint64_t> clip(const py::array_t<std::uint64_t, py::array::c_style | py::array::forcecast>& rows,
                                py::handle begin, py::handle end) {
  if (rows.ndim() != 2 || rows.shape(1) != 3) {
    throw Error(ErrorCode::kArgument, "strips must have the shape (n, 3)");
  }
  std::vector<BlockStrip> strips(static_cast<std::size_t>(rows.shape(0)));
  if (!strips.empty()) std::memcpy(strips.data(), rows.data(), strips.size() * sizeof(BlockStrip));
  return strip_rows(clip_strips(strips, count_from(begin, "begin"), count_from(end, "end")));
}

}  // namespace

void bind_reshard(py::module_& module) {
  module.def("_rank_slices", &rank_slices, py::arg("shape"), py::arg("parallel"));
  module.def("_plan_reshard", &plan, py::arg("sender_shape"), py::arg("sender"), py::arg("receiver_shape"),
             py::arg("receiver"));
  module.def("_clip_strips", &clip, py::arg("strips"), py::arg("begin"), py::arg("end"));
}

}  // namespace kvpool::bindings
