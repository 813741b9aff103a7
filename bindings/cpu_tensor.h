// Tensors in the CPU's memory that a caller passes: NumPy arrays and other buffers, or anything with __dlpack__.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kvpool/base/page_format.h"

namespace kvpool::bindings {

// Dense, in C order. Keeps the memory.
struct CpuTensor {
  std::byte* data = nullptr;
  DType dtype = DType::kNone;
  std::vector<std::int64_t> shape;
  std::size_t bytes = 0;
  pybind11::object keep;
};

// Of float32, float16 or bfloat16. NumPy has no bfloat16: an array of uint16 holds its bits, as views of a pool do.
// Raises ArgumentTypeError for what is no tensor, and ArgumentError for other types, memory of a GPU, and what is not
// dense or, with `writable`, read-only.
CpuTensor cpu_tensor_from(const pybind11::object& argument, const std::string& name, bool writable);

// Throws kArgument unless its dimensions are these; -1: any. `text` is how messages call them: "[token, head, dim]".
void check_shape(const CpuTensor& tensor, const std::string& name, std::span<const std::int64_t> wanted,
                 const std::string& text);

}  // namespace kvpool::bindings
