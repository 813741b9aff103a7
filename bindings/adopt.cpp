#include "adopt.h"

#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "arguments.h"
#include "dlpack.h"
#include "kvpool/base/error.h"
#include "kvpool/cuda/context.h"
#include "vectors.h"

namespace kvpool::bindings {
namespace {

struct TensorView {
  std::byte* data;
  std::size_t item_bytes;
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;  // in elements
  int device = -1;                    // a GPU; -1: the CPU
};

[[noreturn]] void throw_mismatch(std::size_t position, const std::string& what) {
  throw Error(ErrorCode::kLayoutMismatch, "tensor " + std::to_string(position) + ": " + what,
              {{"position", static_cast<std::int64_t>(position)}});
}

// Ctrl-C, say, is not what a tensor says of itself.
void throw_unless_exception(const py::error_already_set& error) {
  if (!error.matches(PyExc_Exception)) throw error;
}

// The GPU whose memory this is, as the driver knows it.
int gpu_of(const std::byte* data, std::size_t position) {
  const auto context = CudaContext::retain_current("tensors on a GPU cannot be adopted");
  const CurrentContext current(*context, "tensors on a GPU cannot be adopted");
  int ordinal = -1;
  const auto pointer = static_cast<CuPointer>(reinterpret_cast<std::uintptr_t>(data));
  if (context->driver().pointer_get_attribute(&ordinal, kCuPointerDeviceOrdinal, pointer) != kCudaSuccess) {
    throw_mismatch(position, "the CUDA driver does not know its memory");
  }
  return ordinal;
}

// Names are those of kvpool's types where it has the type.
std::string dtype_name_of(const DLDataType& dtype) {
  const int bits = dtype.bits * dtype.lanes;
  switch (dtype.code) {
    case kDLInt:
      return "int" + std::to_string(bits);
    case kDLUInt:
      return "uint" + std::to_string(bits);
    case kDLFloat:
      return "float" + std::to_string(bits);
    case kDLBfloat:
      return "bfloat" + std::to_string(bits);
    case kDLFloat8_e4m3fn:
      return "float8_e4m3fn";
    case kDLFloat8_e5m2:
      return "float8_e5m2";
    default:
      return "DLPack type " + std::to_string(dtype.code) + " of " + std::to_string(bits) + " bits";
  }
}

// Of a typestr such as "<f2": order, kind, bytes.
std::string dtype_name_of(const std::string& typestr, std::size_t item_bytes) {
  const std::string bits = std::to_string(8 * item_bytes);
  switch (typestr[1]) {
    case 'i':
      return "int" + bits;
    case 'u':
    case 'V':
      return "uint" + bits;
    case 'f':
      return "float" + bits;
    default:
      return typestr;
  }
}

std::vector<std::int64_t> dense_strides(const std::vector<std::int64_t>& shape) {
  std::vector<std::int64_t> strides(shape.size());
  std::int64_t dense = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    strides[i] = dense;
    dense *= shape[i];
  }
  return strides;
}

// Where it is, or -1. Raises Unsupported for memory that is neither the CPU's nor one GPU's.
int device_from(int type, int id, std::size_t position) {
  if (type == kDLCPU || type == kDLCUDAHost) return -1;  // page-locked memory is the CPU's, too
  if (type == kDLCUDA) return id;
  throw Error(ErrorCode::kUnsupported, "tensor " + std::to_string(position) +
                                           " is neither on the CPU nor on a CUDA device (DLPack device type " +
                                           std::to_string(type) + ")");
}

// Reads the capsule and releases it: only the tensor object itself is kept.
TensorView view_by_dlpack(const py::object& tensor, std::size_t position) {
  py::object capsule;
  try {
    const auto where = py::hasattr(tensor, "__dlpack_device__")
                           ? tensor.attr("__dlpack_device__")().cast<std::pair<int, int>>()
                           : std::pair<int, int>(kDLCPU, 0);
    // -1: only the address is wanted, there is nothing to be ordered.
    capsule = device_from(where.first, where.second, position) < 0 ? tensor.attr("__dlpack__")()
                                                                   : tensor.attr("__dlpack__")(py::arg("stream") = -1);
  } catch (const py::error_already_set& error) {
    throw_unless_exception(error);
    throw_mismatch(position, std::string("it gives no DLPack view: ") + error.what());
  } catch (const py::cast_error&) {
    throw_mismatch(position, "it gives no DLPack view: its __dlpack_device__ returns no two ints");
  }
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor") == 0) {
    throw_mismatch(position, "it gives no DLPack view: its __dlpack__ returns " + type_name(capsule));
  }
  const auto* managed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  const DLTensor& view = managed->dl_tensor;
  TensorView result;
  result.device = device_from(static_cast<int>(view.device.device_type), view.device.device_id, position);
  result.data = static_cast<std::byte*>(view.data) + view.byte_offset;
  result.item_bytes = (static_cast<std::size_t>(view.dtype.bits) * view.dtype.lanes + 7) / 8;
  result.dtype = dtype_name_of(view.dtype);
  result.shape.assign(view.shape, view.shape + view.ndim);
  result.strides = view.strides == nullptr ? dense_strides(result.shape)
                                           : std::vector<std::int64_t>(view.strides, view.strides + view.ndim);
  return result;
}

// For what has no DLPack. The interface does not say on which GPU: the driver does.
TensorView view_by_cuda_interface(const py::object& tensor, std::size_t position) {
  try {
    const py::dict interface(tensor.attr("__cuda_array_interface__"));
    const py::tuple data(interface["data"]);
    if (data[1].cast<bool>()) throw_mismatch(position, "it is read-only");
    TensorView result;
    result.data = reinterpret_cast<std::byte*>(data[0].cast<std::uintptr_t>());  // NOLINT(performance-no-int-to-ptr)
    result.shape = interface["shape"].cast<std::vector<std::int64_t>>();
    const auto typestr = interface["typestr"].cast<std::string>();  // "<f2": order, kind, bytes
    result.item_bytes = typestr.size() < 3 ? 0 : std::stoul(typestr.substr(2));
    if (result.item_bytes == 0) throw_mismatch(position, "its type '" + typestr + "' has no size");
    result.dtype = dtype_name_of(typestr, result.item_bytes);
    result.strides = dense_strides(result.shape);
    if (interface.contains("strides") && !interface["strides"].is_none()) {
      result.strides = interface["strides"].cast<std::vector<std::int64_t>>();
      const auto item = static_cast<std::int64_t>(result.item_bytes);
      for (std::int64_t& stride : result.strides) {
        if (stride % item != 0) throw_mismatch(position, "a stride is no multiple of its elements");
        stride /= item;
      }
      if (result.strides.size() != result.shape.size()) throw_mismatch(position, "strides and shape differ in length");
    }
    result.device = gpu_of(result.data, position);
    return result;
  } catch (const py::error_already_set& error) {
    throw_unless_exception(error);
    throw_mismatch(position, std::string("its __cuda_array_interface__ is not one: ") + error.what());
  } catch (const py::cast_error& error) {
    throw_mismatch(position, std::string("its __cuda_array_interface__ is not one: ") + error.what());
  } catch (const std::logic_error& error) {  // of std::stoul
    throw_mismatch(position, std::string("its __cuda_array_interface__ has an invalid type: ") + error.what());
  }
}

TensorView view_of(const py::object& tensor, std::size_t position) {
  if (py::hasattr(tensor, "__dlpack__")) return view_by_dlpack(tensor, position);
  if (py::hasattr(tensor, "__cuda_array_interface__")) return view_by_cuda_interface(tensor, position);
  throw_type_error("tensor " + std::to_string(position) + " has no __dlpack__: " + type_name(tensor));
}

// More runs than pieces are refused before they are counted: with strides of 0 a small tensor has no end of them.
void append_segments(const TensorView& view, std::size_t position, std::size_t block_dim, std::size_t pieces,
                     std::vector<Segment>& segments) {
  std::int64_t piece = 1;  // elements
  for (std::size_t i = view.shape.size(); i-- > block_dim + 1;) {
    if (view.shape[i] != 1 && view.strides[i] != piece) {
      throw_mismatch(position, "dimension " + std::to_string(i) +
                                   " is not contiguous: what follows the block dimension must be one run of bytes");
    }
    piece *= view.shape[i];
  }
  if (view.strides[block_dim] < 0) throw_mismatch(position, "the block dimension has a negative stride");
  // The dimensions before the blocks, counted like an odometer.
  std::vector<std::int64_t> index(block_dim, 0);
  for (;;) {
    std::int64_t offset = 0;
    for (std::size_t i = 0; i < block_dim; ++i) offset += index[i] * view.strides[i];
    const auto item = static_cast<std::int64_t>(view.item_bytes);
    if (segments.size() >= pieces) {
      throw_mismatch(position, "with it a block has more than " + std::to_string(pieces) +
                                   (pieces == 1 ? " run" : " runs") + " of bytes, the number of pieces of the layout");
    }
    segments.push_back(Segment{view.data + offset * item, static_cast<std::size_t>(view.strides[block_dim] * item),
                               static_cast<std::size_t>(piece * item)});
    std::size_t digit = block_dim;
    while (digit > 0 && ++index[digit - 1] == view.shape[digit - 1]) index[--digit] = 0;
    if (digit == 0) return;
  }
}

// Keeps Python objects for C++ threads: releases them under the GIL, or, when the interpreter is gone, not at all.
std::shared_ptr<void> keep(py::object object) {
  return {new py::object(std::move(object)), [](void* pointer) {
            if (Py_IsInitialized() == 0) return;
            const py::gil_scoped_acquire gil;
            delete static_cast<py::object*>(pointer);
          }};
}

}  // namespace

AdoptedMemory adopt_tensors(const py::object& argument, std::size_t block_dim, std::size_t pieces) {
  const std::vector<py::object> items = items_from(argument, "hbm");
  py::tuple tensors(items.size());  // a list may change while the pool lives
  for (std::size_t i = 0; i < items.size(); ++i) tensors[i] = items[i];
  AdoptedMemory adopted;
  if (tensors.size() == 0) throw Error(ErrorCode::kArgument, "no tensors to adopt");
  for (std::size_t position = 0; position < tensors.size(); ++position) {
    const TensorView view = view_of(tensors[position], position);
    if (block_dim >= view.shape.size()) {
      throw_mismatch(position, "it has " + std::to_string(view.shape.size()) + " dimensions, and block_dim is " +
                                   std::to_string(block_dim));
    }
    for (const std::int64_t extent : view.shape) {
      if (extent <= 0) throw_mismatch(position, "it is empty");
    }
    const std::int64_t blocks = view.shape[block_dim];
    if (position == 0) {
      if (blocks > kBlocksMax) throw_mismatch(position, "more than " + std::to_string(kBlocksMax) + " blocks");
      adopted.blocks = static_cast<std::uint32_t>(blocks);
      adopted.device = view.device;
    }
    if (view.device != adopted.device) throw_mismatch(position, "it is not on the device of tensor 0");
    if (blocks != adopted.blocks) {
      throw_mismatch(
          position, "it has " + std::to_string(blocks) + " blocks, and tensor 0 has " + std::to_string(adopted.blocks));
    }
    append_segments(view, position, block_dim, pieces, adopted.segments);
    adopted.tensors.push_back({view.shape, block_dim, view.dtype, view.item_bytes});
  }
  adopted.keepalive = keep(tensors);
  return adopted;
}

}  // namespace kvpool::bindings
