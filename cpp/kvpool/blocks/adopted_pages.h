// Checks that the tensors of an engine hold a layout's pages. Sizes are not enough: a page [head, token, K|V]
// has as many bytes as [k/v, head, token, dim], and cutting it as such sends wrong bytes. Shapes and types are enough,
// unless two dimensions have the same extent: then nothing here distinguishes heads from tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kvpool/blocks/layout.h"

namespace kvpool {

struct TensorShape {
  std::vector<std::int64_t> shape;
  std::size_t block_dim = 0;  // which dimension counts blocks
  std::string dtype;          // "bfloat16", "uint16", ...
  std::size_t item_bytes = 0;
};

// Throws kLayoutMismatch (position) unless each tensor may hold pages of the layout's format, in the layout's order:
//
//   shape   [head, token, row] or [token, head, row], as the format says, without the block dimension and without
//           dimensions of 1; before them nothing, or k/v (of a split format), or layers and k/v. Or a single dimension
//           after the block dimension: the bytes of a page, which declare nothing, so the layout decides.
//   dtype   that of the format; or an unsigned integer (or int8) of the same size, because engines and NumPy use these
//           for types that they do not know; or bytes, if a single dimension follows the block dimension.
//
// A layout of raw bytes fits everything. REQUIRES: each tensor has a dimension block_dim, no extent is 0, and the
// tensors' pieces are whole pieces of the layout.
void check_adopted_pages(const Layout& layout, std::span<const TensorShape> tensors);

}  // namespace kvpool
