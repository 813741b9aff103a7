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
  struct Item {
    PartialAttention part;
    std::optional<std::uint64_t> tokens;  // of the sequence, where it is known
    // The queries are the last ones of these tokens, and each row sees the tokens up to its own: no row may see a token
    // behind them.
    bool ends_at_queries = false;
  };
  std::uint32_t heads = 0;  // also of an empty batch
  std::uint32_t head_dim = 0;
  std::vector<Item> items;  // one for each sequence
};

// How many query tokens each sequence has: numbers, or None for one each. Raises ArgumentError for another number of
// them.
std::vector<std::uint32_t> query_tokens_from(const pybind11::object& argument, std::size_t sequences);

}  // namespace kvpool::bindings
