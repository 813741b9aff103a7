#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kvpool/arena/arena.h"

namespace kvpool::bindings {

// A strided view of an arena; keeps it.
struct KVTensor {
  std::shared_ptr<Arena> arena;
  std::byte* data = nullptr;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;  // bytes
  std::string dtype;
  std::size_t item_bytes = 0;
};

// "cpu", or "cuda:0" and so on.
std::string device_name(const Arena& arena);

// Throws Error kLayoutMismatch when the view would reach beyond the arena.
KVTensor make_tensor(std::shared_ptr<Arena> arena, std::vector<std::int64_t> shape, std::vector<std::int64_t> strides,
                     const std::string& dtype);

}  // namespace kvpool::bindings
