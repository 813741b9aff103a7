// Shapes and parallel configurations, as Python hands them over.
#pragma once

#include <pybind11/pybind11.h>

#include "kvpool/transfer/reshard.h"

namespace kvpool::bindings {

// (layers, kv_heads, head_dim, dtype, block_tokens, tokens_first, fused).
KVShape shape_from(const pybind11::tuple& shape);
// The same, and (tp, pp, split, stage_layers). Throws kArgument when they do not fit each other.
Sharding sharding_from(const pybind11::tuple& shape, const pybind11::tuple& parallel);

}  // namespace kvpool::bindings
