// Views of an arena's memory: DLPack and the buffer protocol, both without a copy.
#include "tensor.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "arguments.h"
#include "bind.h"
#include "dlpack.h"
#include "kvpool/arena/arena.h"
#include "kvpool/cuda/context.h"
#include "vectors.h"

namespace kvpool::bindings {
namespace {

struct Dtype {
  const char* name;
  DLDataType dlpack;
  const char* buffer_format;  // where NumPy has no such type: unsigned integers of the same size
};

// The codes of DLPack 1.1 for 8-bit floats.
constexpr std::uint8_t kFloat8E4m3fn = 10;
constexpr std::uint8_t kFloat8E5m2 = 12;
constexpr Dtype kDtypes[] = {
    {"float32", {kDLFloat, 32, 1}, "f"},       {"float16", {kDLFloat, 16, 1}, "e"},
    {"bfloat16", {kDLBfloat, 16, 1}, "H"},     {"float8_e4m3fn", {kFloat8E4m3fn, 8, 1}, "B"},
    {"float8_e5m2", {kFloat8E5m2, 8, 1}, "B"}, {"int8", {kDLInt, 8, 1}, "b"},
    {"uint8", {kDLUInt, 8, 1}, "B"},
};

const Dtype& dtype_named(const std::string& name) {
  for (const Dtype& dtype : kDtypes) {
    if (name == dtype.name) return dtype;
  }
  throw Error(ErrorCode::kArgument, "no dtype is called " + name);
}

DLDevice device_of(const KVTensor& tensor) {
  if (!tensor.arena->on_device()) return {kDLCPU, 0};
  return {kDLCUDA, tensor.arena->context()->ordinal()};
}

void require_cpu(const KVTensor& tensor) {
  if (!tensor.arena->on_device()) return;
  throw Error(
      ErrorCode::kUnsupported,
      "this memory is on " + device_name(*tensor.arena) +
          ", which NumPy and the CPU cannot read: use torch.from_dlpack(view), CuPy or JAX, and copy from there",
      {{"device", tensor.arena->context()->ordinal()}});
}

// The producer need not wait for the consumer's stream, because every call of the pool that writes has ended when it
// returns. So a stream is only checked.
void check_stream(const KVTensor& tensor, const py::object& stream) {
  if (stream.is_none()) return;
  if (!tensor.arena->on_device()) {
    throw Error(ErrorCode::kArgument, "memory of the CPU has no stream: pass stream=None");
  }
  if (PyLong_Check(stream.ptr()) == 0 || PyBool_Check(stream.ptr()) != 0) {
    throw_type_error("stream must be None or an int, not " + type_name(stream));
  }
  int overflow = 0;  // of an int that is no stream either; it leaves no exception behind
  if (PyLong_AsLongAndOverflow(stream.ptr(), &overflow) == 0) {
    throw Error(ErrorCode::kArgument, "stream 0 may be two streams: 1 is the default one, 2 that of the thread");
  }
}

// What a consumer of a capsule holds: it keeps the arena and nothing of Python, so it may go at any time, in any
// thread, even after the interpreter.
struct Export {
  std::shared_ptr<Arena> arena;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;
};

template <class Managed>
struct ManagedExport {
  Managed managed{};
  Export content;
};

template <class Managed>
py::capsule make_capsule(const KVTensor& tensor, const char* name) {
  auto owner = std::make_unique<ManagedExport<Managed>>();
  Export& content = owner->content;
  content.arena = tensor.arena;
  const auto item = static_cast<std::int64_t>(tensor.item_bytes);
  for (std::size_t i = 0; i < tensor.shape.size(); ++i) {
    content.shape.push_back(tensor.shape[i]);
    content.strides.push_back(tensor.strides[i] / item);
  }
  DLTensor& view = owner->managed.dl_tensor;
  view.data = tensor.data;
  view.device = device_of(tensor);
  view.ndim = static_cast<std::int32_t>(content.shape.size());
  view.dtype = dtype_named(tensor.dtype).dlpack;
  view.shape = content.shape.data();
  view.strides = content.strides.data();
  view.byte_offset = 0;
  if constexpr (std::is_same_v<Managed, DLManagedTensorVersioned>) {
    owner->managed.version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
    owner->managed.flags = 0;  // writable, not a copy
  }
  owner->managed.manager_ctx = owner.get();
  owner->managed.deleter = [](Managed* self) { delete static_cast<ManagedExport<Managed>*>(self->manager_ctx); };
  PyObject* capsule = PyCapsule_New(&owner->managed, name, [](PyObject* object) {
    // A consumer that took the tensor renamed the capsule.
    constexpr const char* kName = std::is_same_v<Managed, DLManagedTensorVersioned> ? "dltensor_versioned" : "dltensor";
    if (PyCapsule_IsValid(object, kName) == 0) return;
    auto* managed = static_cast<Managed*>(PyCapsule_GetPointer(object, kName));
    managed->deleter(managed);
  });
  if (capsule == nullptr) throw py::error_already_set();
  owner.release();  // NOLINT(bugprone-unused-return-value): the capsule owns it
  return py::reinterpret_steal<py::capsule>(capsule);
}

// What is above the largest int becomes that.
std::pair<int, int> int_pair(const py::object& argument, const char* name) {
  const std::vector<py::object> items = items_from(argument, name);
  if (items.size() != 2)
    throw_type_error(std::string(name) + " must be two ints, and has " + std::to_string(items.size()) + " items");
  const auto number = [&](const py::object& item) {
    return static_cast<int>(std::min<std::size_t>(count_from(item, name), std::numeric_limits<int>::max()));
  };
  return {number(items[0]), number(items[1])};
}

py::capsule to_dlpack(const KVTensor& tensor, const py::object& stream, const py::object& max_version,
                      const py::object& dl_device, const py::object& copy) {
  check_stream(tensor, stream);
  if (!copy.is_none() && flag_from(copy, "copy")) {
    throw Error(ErrorCode::kUnsupported, "a view is never a copy: copy what you imported");
  }
  const DLDevice device = device_of(tensor);
  const std::pair<int, int> here(static_cast<int>(device.device_type), device.device_id);
  if (!dl_device.is_none() && int_pair(dl_device, "dl_device") != here) {
    throw Error(ErrorCode::kUnsupported,
                "this memory is on " + (tensor.arena->on_device() ? device_name(*tensor.arena) : "the CPU"));
  }
  if (!max_version.is_none() && int_pair(max_version, "max_version").first >= 1) {
    return make_capsule<DLManagedTensorVersioned>(tensor, "dltensor_versioned");
  }
  return make_capsule<DLManagedTensor>(tensor, "dltensor");
}

py::buffer_info to_buffer(KVTensor& tensor) {
  require_cpu(tensor);
  return {tensor.data,
          static_cast<py::ssize_t>(tensor.item_bytes),
          dtype_named(tensor.dtype).buffer_format,
          static_cast<py::ssize_t>(tensor.shape.size()),
          std::vector<py::ssize_t>(tensor.shape.begin(), tensor.shape.end()),
          std::vector<py::ssize_t>(tensor.strides.begin(), tensor.strides.end())};
}

// Version 3 of the protocol of Numba, CuPy and torch. There is no type string for bfloat16 and 8-bit floats: unsigned
// integers of the same size, as for NumPy.
py::dict cuda_array_interface(const KVTensor& tensor) {
  if (!tensor.arena->on_device()) throw py::attribute_error("__cuda_array_interface__: this memory is on the CPU");
  const char format = dtype_named(tensor.dtype).buffer_format[0];
  const char kind = format == 'f' || format == 'e' ? 'f' : format == 'b' ? 'i' : 'u';
  py::dict interface;
  interface["shape"] = py::tuple(py::cast(tensor.shape));
  interface["strides"] = py::tuple(py::cast(tensor.strides));
  interface["typestr"] = std::string(tensor.item_bytes == 1 ? "|" : "<") + kind + std::to_string(tensor.item_bytes);
  interface["data"] = py::make_tuple(reinterpret_cast<std::uintptr_t>(tensor.data), false);
  interface["stream"] = py::none();  // nothing to wait for: see check_stream
  interface["version"] = 3;
  return interface;
}

// NumPy asks for this if there is no buffer; without it, NumPy would make an array of one object.
py::object as_array(const py::object& self, const py::object& dtype, const py::object& copy) {
  require_cpu(self.cast<const KVTensor&>());
  py::dict options;
  if (!copy.is_none()) options["copy"] = copy;
  return py::module_::import("numpy").attr("array")(py::memoryview(self), dtype, **options);
}

// Bytes from the beginning of an arena to the end of its last piece.
std::int64_t reach_of(const Arena& arena) {
  std::int64_t reach = 0;
  for (const Segment& segment : arena.segments()) {
    const std::byte* const last = segment.base + std::size_t{arena.blocks() - 1} * segment.stride;
    reach = std::max<std::int64_t>(reach, last + segment.bytes - arena.segments().front().base);
  }
  return arena.blocks() == 0 ? 0 : reach;
}

}  // namespace

std::string device_name(const Arena& arena) {
  return arena.on_device() ? "cuda:" + std::to_string(arena.context()->ordinal()) : "cpu";
}

KVTensor make_tensor(std::shared_ptr<Arena> arena, std::vector<std::int64_t> shape, std::vector<std::int64_t> strides,
                     const std::string& dtype) {
  KVTensor tensor;
  tensor.item_bytes = dtype_named(dtype).dlpack.bits / 8U;
  // The last byte that the view reaches must lie in the arena.
  std::int64_t reach = static_cast<std::int64_t>(tensor.item_bytes);
  bool empty = false;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    reach += (shape[i] - 1) * strides[i];
    empty = empty || shape[i] == 0;
  }
  if (!empty && reach > reach_of(*arena)) {
    throw Error(ErrorCode::kLayoutMismatch, "the view reaches beyond its arena");
  }
  tensor.data = arena->segments().empty() ? nullptr : arena->segments().front().base;
  tensor.arena = std::move(arena);
  tensor.shape = std::move(shape);
  tensor.strides = std::move(strides);
  tensor.dtype = dtype;
  return tensor;
}

void bind_tensor(py::module_& module) {
  py::class_<KVTensor>(module, "KVTensor", py::buffer_protocol(), R"(A zero-copy, writable view of one medium's blocks.

Shape [block, layer, k/v, head, token, dim] for a KVLayout, [block, byte] for a RawLayout; index it with
``kvpool.block_ids(addrs)``. ``torch.from_dlpack(view)``, ``jax.dlpack.from_dlpack(view)`` and so on keep the dtype;
NumPy has no bfloat16 and no float8, so its views of those are uint16 and uint8. A view keeps the memory allocated, even
after the pool is closed; it does not synchronise. A view of a pool on a GPU is for torch, CuPy and JAX (``__dlpack__``,
``__cuda_array_interface__``); NumPy cannot read it.

Attributes:
    shape: tuple of ints.
    strides: tuple of ints, in bytes.
    dtype: str, such as "bfloat16".
    nbytes: Bytes that the elements take.
    device: str, "cpu" or "cuda:0" and so on.)")
      .def_buffer(&to_buffer)
      .def_property_readonly(
          "shape", [](const KVTensor& tensor) { return py::tuple(py::cast(tensor.shape)); },
          "Extents; a tuple of ints.")
      .def_property_readonly(
          "strides", [](const KVTensor& tensor) { return py::tuple(py::cast(tensor.strides)); },
          "Bytes from one element of a dimension to the next; a tuple of ints.")
      .def_readonly("dtype", &KVTensor::dtype, "Name of the element type, such as \"bfloat16\".")
      .def_property_readonly(
          "nbytes",
          [](const KVTensor& tensor) {
            std::int64_t bytes = static_cast<std::int64_t>(tensor.item_bytes);
            for (const std::int64_t extent : tensor.shape) bytes *= extent;
            return bytes;
          },
          "Bytes that the elements take.")
      .def(
          "numpy",
          [](const py::object& self) {
            require_cpu(self.cast<const KVTensor&>());
            return py::module_::import("numpy").attr("asarray")(self);
          },
          "A NumPy array over the same memory. Raises Unsupported for memory of a GPU.")
      .def("__array__", &as_array, py::arg("dtype") = py::none(), py::arg("copy") = py::none(),
           "NumPy's protocol. Raises Unsupported for memory of a GPU.")
      .def_property_readonly("__cuda_array_interface__", &cuda_array_interface,
                             "Version 3 of the CUDA array interface; AttributeError for memory of the CPU.")
      .def_property_readonly(
          "device", [](const KVTensor& tensor) { return device_name(*tensor.arena); },
          "Where the memory is: \"cpu\", or \"cuda:0\" and so on.")
      .def("__dlpack__", &to_dlpack, py::kw_only(), py::arg("stream") = py::none(), py::arg("max_version") = py::none(),
           py::arg("dl_device") = py::none(), py::arg("copy") = py::none(),
           "The DLPack protocol: a view, never a copy.")
      .def(
          "__dlpack_device__",
          [](const KVTensor& tensor) {
            const DLDevice device = device_of(tensor);
            return py::make_tuple(static_cast<int>(device.device_type), device.device_id);
          },
          "The DLPack protocol: where the memory is.")
      .def(
          "__len__", [](const KVTensor& tensor) { return tensor.shape.front(); }, "Number of blocks.")
      .def("__repr__", [](const KVTensor& tensor) {
        return "<KVTensor " + tensor.dtype + " " + py::repr(py::tuple(py::cast(tensor.shape))).cast<std::string>() +
               ">";
      });
}

}  // namespace kvpool::bindings
