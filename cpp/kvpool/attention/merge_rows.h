// The one place where two partial results of the same rows become one: ScaleReduce.
//
// Compiled once, for every processor, and without contracting a product and a sum into one rounding, so that a merge
// has the same bits wherever it runs, whichever kernel computed its parts.
#pragma once

#include <cstddef>

namespace kvpool {

// acc [row, dim], max [row], sum [row] of some rows; as in PartialNode::values.
struct RowsView {
  float* acc;
  float* max;
  float* sum;
};

struct ConstRowsView {
  const float* acc;
  const float* max;
  const float* sum;
};

// 2^x for x <= 0: within 2e-7, exactly 1 for 0, and 0 below 2^-126. NaN stays NaN.
float exp2_of_difference(float x) noexcept;

// into = into + from. Which of the two stands left in the sequence makes no difference to the bits.
// A max of -inf is a row that saw no token: of two such rows the result is one, not NaN.
void merge_rows(const RowsView& into, const ConstRowsView& from, std::size_t rows, std::size_t dim) noexcept;

}  // namespace kvpool
