#include "cpu_tensor.h"

#include <memory>
#include <utility>

#include "arguments.h"
#include "dlpack.h"

namespace kvpool::bindings {
namespace {

constexpr int kDimensionsMax = 64;

DType dtype_of(const DLDataType& dtype) {
  if (dtype.lanes != 1) return DType::kNone;
  if (dtype.code == kDLFloat && dtype.bits == 32) return DType::kFloat32;
  if (dtype.code == kDLFloat && dtype.bits == 16) return DType::kFloat16;
  if (dtype.code == kDLBfloat && dtype.bits == 16) return DType::kBfloat16;
  return DType::kNone;
}

// By the format of the buffer protocol.
DType dtype_of(const std::string& format) {
  if (format == "f") return DType::kFloat32;
  if (format == "e") return DType::kFloat16;
  if (format == "H") return DType::kBfloat16;
  return DType::kNone;
}

[[noreturn]] void throw_no_tensor(const std::string& name, const std::string& what) {
  throw_argument(name + " " + what);
}

void check_dtype(const CpuTensor& tensor, const std::string& name, const std::string& given) {
  if (tensor.dtype != DType::kNone) return;
  throw_no_tensor(name, "must be of float32, float16 or bfloat16 (as NumPy has it: uint16), and is of " + given);
}

// `strides` in units of which an element has `item`.
bool is_dense(const std::vector<std::int64_t>& shape, const std::vector<std::int64_t>& strides, std::int64_t item) {
  std::int64_t dense = item;
  for (std::size_t i = shape.size(); i-- > 0;) {
    if (shape[i] > 1 && strides[i] != dense) return false;
    dense *= shape[i];
  }
  return true;
}

void finish(CpuTensor& tensor, const std::string& name, bool dense) {
  constexpr std::int64_t kElementsMax = std::int64_t{1} << 48;  // far above any memory, far below an overflow
  std::int64_t elements = 1;
  for (const std::int64_t extent : tensor.shape) {
    if (extent < 0 || (extent > 0 && elements > kElementsMax / extent)) {
      throw_no_tensor(name, "has an impossible dimension of " + std::to_string(extent));
    }
    elements *= extent;
  }
  tensor.bytes = static_cast<std::size_t>(elements) * dtype_bytes(tensor.dtype);
  if (!dense && elements > 0) throw_no_tensor(name, "must be contiguous in C order: pass .contiguous() or .copy()");
}

CpuTensor from_buffer(const py::object& argument, const std::string& name, bool writable) {
  auto view = std::make_unique<Py_buffer>();
  const int flags = PyBUF_STRIDES | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
  if (PyObject_GetBuffer(argument.ptr(), view.get(), flags) != 0) {
    const py::error_already_set error;
    if (!error.matches(PyExc_Exception)) throw error;
    throw_no_tensor(name, std::string("gives no ") + (writable ? "writable " : "") + "buffer: " + error.what());
  }
  CpuTensor tensor;
  tensor.data = static_cast<std::byte*>(view->buf);
  const std::string format = view->format == nullptr ? "B" : view->format;
  tensor.dtype = dtype_of(
      format.size() == 2 && (format[0] == '<' || format[0] == '=' || format[0] == '@') ? format.substr(1) : format);
  tensor.shape.assign(view->shape, view->shape + view->ndim);
  const std::vector<std::int64_t> strides(view->strides, view->strides + view->ndim);
  const auto item = static_cast<std::int64_t>(view->itemsize);
  // A capsule, so that the buffer is let go where the tensor is, under the GIL.
  tensor.keep = py::capsule(view.release(), [](void* pointer) {
    const std::unique_ptr<Py_buffer> owned(static_cast<Py_buffer*>(pointer));
    PyBuffer_Release(owned.get());
  });
  check_dtype(tensor, name, "format '" + format + "'");
  finish(tensor, name, is_dense(tensor.shape, strides, item));
  return tensor;
}

// Page-locked memory is the CPU's, too.
void check_on_cpu(int type, int id, const std::string& name) {
  if (type == kDLCPU || type == kDLCUDAHost) return;
  throw_no_tensor(name,
                  "must be on the CPU, and is on DLPack device " + std::to_string(type) + ":" + std::to_string(id));
}

CpuTensor from_dlpack(const py::object& argument, const std::string& name) {
  py::object capsule;
  std::pair<int, int> where(kDLCPU, 0);
  try {
    if (py::hasattr(argument, "__dlpack_device__")) {
      where = argument.attr("__dlpack_device__")().cast<std::pair<int, int>>();
    }
    check_on_cpu(where.first, where.second, name);
    capsule = argument.attr("__dlpack__")();
  } catch (const py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;
    throw_no_tensor(name, std::string("gives no DLPack view: ") + error.what());
  } catch (const py::cast_error&) {
    throw_no_tensor(name, "gives no DLPack view: its __dlpack_device__ returns no two ints");
  }
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor") == 0) {
    throw_no_tensor(name, "gives no DLPack view: its __dlpack__ returns " + type_name(capsule));
  }
  const auto* managed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  const DLTensor& view = managed->dl_tensor;
  check_on_cpu(static_cast<int>(view.device.device_type), view.device.device_id, name);  // it may contradict `where`
  if (view.ndim < 0 || view.ndim > kDimensionsMax) {
    throw_no_tensor(name, "has " + std::to_string(view.ndim) + " dimensions");
  }
  CpuTensor tensor;
  tensor.data = static_cast<std::byte*>(view.data) + view.byte_offset;
  tensor.dtype = dtype_of(view.dtype);
  tensor.shape.assign(view.shape, view.shape + view.ndim);
  tensor.keep = capsule;  // which nobody consumes: it lets the tensor go with itself
  check_dtype(tensor, name,
              "DLPack type " + std::to_string(view.dtype.code) + " of " + std::to_string(view.dtype.bits) + " bits");
  finish(tensor, name,
         view.strides == nullptr ||
             is_dense(tensor.shape, std::vector<std::int64_t>(view.strides, view.strides + view.ndim), 1));
  return tensor;
}

std::string shape_text(std::span<const std::int64_t> shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ", ";
    text += shape[i] < 0 ? "any" : std::to_string(shape[i]);
  }
  return text + "]";
}

}  // namespace

CpuTensor cpu_tensor_from(const py::object& argument, const std::string& name, bool writable) {
  if (PyObject_CheckBuffer(argument.ptr()) != 0) return from_buffer(argument, name, writable);
  if (py::hasattr(argument, "__dlpack__")) return from_dlpack(argument, name);
  throw_type_error(name + " must be a NumPy array or a tensor with __dlpack__, not " + type_name(argument));
}

void check_shape(const CpuTensor& tensor, const std::string& name, std::span<const std::int64_t> wanted,
                 const std::string& text) {
  bool same = tensor.shape.size() == wanted.size();
  for (std::size_t i = 0; same && i < wanted.size(); ++i) same = wanted[i] < 0 || tensor.shape[i] == wanted[i];
  if (same) return;
  throw_argument(name + " has shape " + shape_text(tensor.shape) + "; it must be " + text + ", which is " +
                 shape_text(wanted));
}

}  // namespace kvpool::bindings
