// kvpool.KVSequence.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <vector>

#include "bind.h"
#include "kvpool/attention/token_range.h"
#include "kvpool/distributed/sequence.h"

namespace kvpool::bindings {

// Keeps its pool, which goes after the sequence.
struct SequenceHandle {
  NodePointer node;
  std::shared_ptr<Sequence> sequence;
};

// Token ranges as a list of tuples.
pybind11::list ranges_as_list(const std::vector<TokenRange>& ranges);

// And Pool.sequence.
void bind_sequence(pybind11::module_& module, PoolClass& pool);

}  // namespace kvpool::bindings
