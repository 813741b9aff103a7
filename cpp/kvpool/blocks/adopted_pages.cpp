#include "kvpool/blocks/adopted_pages.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "kvpool/base/error.h"

namespace kvpool {
namespace {

using Extents = std::vector<std::int64_t>;

Extents without_ones(Extents extents) {
  std::erase(extents, 1);
  return extents;
}

// A piece of the format, in elements.
Extents piece_of(const PageFormat& format, std::uint32_t block_tokens) {
  const std::int64_t heads = format.kv_heads;
  const std::int64_t tokens = block_tokens;
  const std::int64_t row = (format.fused ? 2 : 1) * std::int64_t{format.head_dim};
  return format.tokens_first ? Extents{tokens, heads, row} : Extents{heads, tokens, row};
}

// What may stand before a piece: nothing, or [k/v], or [layer, k/v]; of a fused format nothing, or [layer].
bool enumerates_pieces(const Extents& outer, bool fused) {
  if (outer.empty()) return true;
  return fused ? outer.size() == 1 : outer.size() <= 2 && outer.back() == 2;
}

// Whether the tensor spells out the pages of the format.
bool spells_out(const TensorShape& tensor, const PageFormat& format, std::uint32_t block_tokens) {
  Extents page = tensor.shape;
  page.erase(page.begin() + static_cast<std::ptrdiff_t>(tensor.block_dim));
  page = without_ones(std::move(page));
  const Extents piece = without_ones(piece_of(format, block_tokens));
  if (page.size() < piece.size()) return false;
  const auto outer_end = page.end() - static_cast<std::ptrdiff_t>(piece.size());
  return std::equal(outer_end, page.end(), piece.begin()) &&
         enumerates_pieces(Extents(page.begin(), outer_end), format.fused);
}

bool is_flat(const TensorShape& tensor) { return tensor.block_dim + 2 >= tensor.shape.size(); }

// One dimension behind the blocks: whether as many pieces in a row continue what stands before the blocks.
bool flat_fits(const TensorShape& tensor, const Layout& layout) {
  const std::size_t bytes =
      tensor.item_bytes *
      static_cast<std::size_t>(tensor.block_dim + 1 < tensor.shape.size() ? tensor.shape.back() : 1);
  const auto pieces = static_cast<std::int64_t>(bytes / layout.piece_bytes[0]);
  Extents outer(tensor.shape.begin(), tensor.shape.begin() + static_cast<std::ptrdiff_t>(tensor.block_dim));
  if (layout.format.fused || pieces == 1) {
    outer.push_back(pieces);
  } else if (pieces % 2 == 0) {
    outer.insert(outer.end(), {pieces / 2, 2});
  } else {
    return false;
  }
  return enumerates_pieces(without_ones(std::move(outer)), layout.format.fused);
}

std::string text_of(const Extents& extents) {
  std::string text;
  for (const std::int64_t extent : extents) text += (text.empty() ? "" : ", ") + std::to_string(extent);
  return "[" + text + "]";
}

std::string text_of(const PageFormat& format, std::uint32_t block_tokens) {
  return std::string(format.fused ? "" : "[k/v 2] ") + (format.tokens_first ? "[token, head, " : "[head, token, ") +
         (format.fused ? "2 * dim] " : "dim] ") + text_of(piece_of(format, block_tokens));
}

// The declaration that these tensors would fit, for the message; "" when they fit none.
std::string hint_for(const TensorShape& tensor, const Layout& layout) {
  for (const bool fused : {false, true}) {
    for (const bool tokens_first : {false, true}) {
      PageFormat format = layout.format;
      format.fused = fused;
      format.tokens_first = tokens_first;
      if (!spells_out(tensor, format, layout.block_tokens)) continue;
      return std::string("; they would be pages of KVLayout(dims=\"") + (tokens_first ? "NHD" : "HND") +
             "\", pages=\"" + (fused ? "fused" : "split") + "\")";
    }
  }
  return "";
}

[[noreturn]] void fail(std::size_t position, const std::string& what) {
  throw Error(ErrorCode::kLayoutMismatch, "tensor " + std::to_string(position) + " " + what,
              {{"position", static_cast<std::int64_t>(position)}});
}

bool holds_bits(std::string_view dtype) {
  constexpr std::array<std::string_view, 4> kBits{"uint8", "int8", "uint16", "uint32"};
  return std::ranges::find(kBits, dtype) != kBits.end();
}

void check_dtype(const TensorShape& tensor, const PageFormat& format, std::size_t position) {
  if (tensor.dtype == dtype_name(format.dtype)) return;
  const bool bytes = tensor.item_bytes == 1 && is_flat(tensor);
  if (holds_bits(tensor.dtype) && (bytes || tensor.item_bytes == dtype_bytes(format.dtype))) return;
  fail(position, "has elements of " + tensor.dtype + ", and the layout's are " + dtype_name(format.dtype));
}

}  // namespace

void check_adopted_pages(const Layout& layout, std::span<const TensorShape> tensors) {
  if (!layout.format.known()) return;
  for (std::size_t position = 0; position < tensors.size(); ++position) {
    const TensorShape& tensor = tensors[position];
    check_dtype(tensor, layout.format, position);
    if (spells_out(tensor, layout.format, layout.block_tokens)) continue;
    if (is_flat(tensor) && flat_fits(tensor, layout)) continue;
    fail(position, "of the shape " + text_of(tensor.shape) + ", in which dimension " +
                       std::to_string(tensor.block_dim) + " counts blocks, does not hold the layout's pages: " +
                       text_of(layout.format, layout.block_tokens) + hint_for(tensor, layout));
  }
}

}  // namespace kvpool
