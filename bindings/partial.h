// kvpool.PartialAttention: the partial results of a batch of sequences.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "kvpool/attention/partial.h"

namespace kvpool::bindings {

struct PartialBatch {
  std::vector<PartialAttention> parts;               // one for each sequence
  std::vector<std::optional<std::uint64_t>> tokens;  // of each sequence, where it is known
};

// How many query tokens each sequence has: numbers, or None for one each. Raises ArgumentError for another number of
// them.
std::vector<std::uint32_t> query_tokens_from(const pybind11::object& argument, std::size_t sequences);

}  // namespace kvpool::bindings
