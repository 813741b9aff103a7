// An engine's own tensors as the memory of a tier.
#pragma once

#include <pybind11/pybind11.h>

#include "kvpool/pool/pool.h"

namespace kvpool::bindings {

// A sequence with one tensor per layer (anything with __dlpack__ or __cuda_array_interface__; all on the CPU, or all on
// one GPU), in the layout's order. Dimension `block_dim` counts the blocks; what stands before it enumerates pieces,
// what follows must be contiguous. Keeps the tensors. Throws kLayoutMismatch also when a block of theirs has more runs
// of bytes than the layout has pieces.
AdoptedMemory adopt_tensors(const pybind11::object& tensors, std::size_t block_dim, std::size_t pieces);

}  // namespace kvpool::bindings
