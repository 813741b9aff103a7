#include "kvpool/blocks/adopted_pages.h"

#include <doctest/doctest.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "thrown.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

constexpr std::int64_t kBlocks = 9;
constexpr std::int64_t kHeads = 2;
constexpr std::int64_t kTokens = 4;
constexpr std::int64_t kDim = 8;

// Three layers of two heads of eight bfloat16, four tokens a block.
Layout layout_of(bool tokens_first, bool fused) {
  Layout layout;
  layout.block_tokens = kTokens;
  layout.format = {kHeads, kDim, DType::kBfloat16, tokens_first, fused};
  const auto piece = static_cast<std::size_t>(kHeads * kTokens) * layout.format.row_bytes();
  layout.piece_bytes.assign(3 * std::size_t{layout.format.pieces_per_layer()}, piece);
  return layout;
}

const Layout kHnd = layout_of(false, false);
const Layout kNhd = layout_of(true, false);
const Layout kFused = layout_of(false, true);
const Layout kFusedNhd = layout_of(true, true);

TensorShape tensor(std::vector<std::int64_t> shape, std::size_t block_dim, std::string dtype = "bfloat16") {
  const std::size_t item = dtype == "uint8" || dtype == "int8" ? 1 : dtype == "float32" || dtype == "uint32" ? 4 : 2;
  return {std::move(shape), block_dim, std::move(dtype), item};
}

bool fits(const Layout& layout, const TensorShape& shape) {
  const std::vector<TensorShape> tensors{shape};
  try {
    check_adopted_pages(layout, tensors);
    return true;
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::kLayoutMismatch);
    return false;
  }
}

}  // namespace

TEST_CASE("tensors with the dimensions of a layout's pages fit it, and no other layout") {
  struct Spelt {
    TensorShape shape;
    const Layout* layout;
  };
  const std::vector<Spelt> all{
      {tensor({kBlocks, 2, kHeads, kTokens, kDim}, 0), &kHnd},
      {tensor({2, kBlocks, kHeads, kTokens, kDim}, 1), &kHnd},
      {tensor({3, 2, kBlocks, kHeads, kTokens, kDim}, 2), &kHnd},
      {tensor({kBlocks, 3, 2, kHeads, kTokens, kDim}, 0), &kHnd},
      {tensor({kBlocks, kHeads, kTokens, kDim}, 0), &kHnd},  // K or V alone
      {tensor({kBlocks, 2, kTokens, kHeads, kDim}, 0), &kNhd},
      {tensor({2, kBlocks, kTokens, kHeads, kDim}, 1), &kNhd},
      {tensor({kBlocks, kHeads, kTokens, 2 * kDim}, 0), &kFused},
      {tensor({3, kBlocks, kHeads, kTokens, 2 * kDim}, 1), &kFused},
      {tensor({kBlocks, kTokens, kHeads, 2 * kDim}, 0), &kFusedNhd},
  };
  for (const Spelt& spelt : all) {
    for (const Layout* layout : {&kHnd, &kNhd, &kFused, &kFusedNhd}) {
      CAPTURE(spelt.shape.shape.size());
      CHECK(fits(*layout, spelt.shape) == (layout == spelt.layout));
    }
  }
}

TEST_CASE("tensors whose block dimension splits what the layout has in a row are refused") {
  // Heads before blocks: as many bytes in a run as a piece has.
  CHECK_FALSE(fits(kHnd, tensor({kHeads, kBlocks, kTokens, 2 * kDim}, 1)));
  // K of all layers, then V of all layers.
  CHECK_FALSE(fits(kHnd, tensor({2, 3, kBlocks, kHeads, kTokens, kDim}, 2)));
  CHECK_FALSE(fits(kHnd, tensor({3, kBlocks, kHeads, kTokens, kDim}, 1)));
}

TEST_CASE("dimensions of size one do not count, and latent pages are one fused head") {
  Layout latent = kFused;
  latent.format = {1, 288, DType::kBfloat16, false, true};
  latent.piece_bytes.assign(3, std::size_t{kTokens} * 576 * 2);
  CHECK(fits(latent, tensor({kBlocks, kTokens, 576}, 0)));
  CHECK(fits(latent, tensor({kBlocks, 1, kTokens, 1, 576}, 0)));
  latent.format.fused = false;
  latent.piece_bytes.assign(6, std::size_t{kTokens} * 288 * 2);
  CHECK_FALSE(fits(latent, tensor({kBlocks, kTokens, 576}, 0)));
}

TEST_CASE("tensors of flat pages say only how many pieces lie in a row") {
  constexpr std::int64_t kPiece = kHeads * kTokens * kDim;
  for (const Layout* layout : {&kHnd, &kNhd}) {
    CHECK(fits(*layout, tensor({kBlocks, kPiece}, 0)));
    CHECK(fits(*layout, tensor({kBlocks, 2 * kPiece}, 0)));
    CHECK(fits(*layout, tensor({kBlocks, 6 * kPiece}, 0)));
    CHECK(fits(*layout, tensor({2, kBlocks, kPiece}, 1)));
    CHECK(fits(*layout, tensor({3, 2, kBlocks, kPiece}, 2)));
    CHECK(fits(*layout, tensor({3, kBlocks, 2 * kPiece}, 1)));
    CHECK_FALSE(fits(*layout, tensor({3, kBlocks, kPiece}, 1)));
    CHECK_FALSE(fits(*layout, tensor({2, kBlocks, 3 * kPiece}, 1)));
  }
  CHECK(fits(kFused, tensor({kBlocks, 2 * kPiece}, 0)));
  CHECK(fits(kFused, tensor({kBlocks, 6 * kPiece}, 0)));
  CHECK(fits(kFused, tensor({3, kBlocks, 2 * kPiece}, 1)));
}

TEST_CASE("elements have the layout's type, or are raw bits of its width") {
  const std::vector<std::int64_t> shape{kBlocks, 2, kHeads, kTokens, kDim};
  CHECK(fits(kHnd, tensor(shape, 0, "bfloat16")));
  CHECK(fits(kHnd, tensor(shape, 0, "uint16")));
  CHECK_FALSE(fits(kHnd, tensor(shape, 0, "float16")));
  CHECK_FALSE(fits(kHnd, tensor({kBlocks, 2, kHeads, kTokens, 2 * kDim}, 0, "uint8")));
  CHECK(fits(kHnd, tensor({kBlocks, 4 * kHeads * kTokens * kDim}, 0, "uint8")));
  CHECK(fits(kHnd, tensor({kBlocks, 4 * kHeads * kTokens * kDim}, 0, "int8")));
  CHECK(text_of([&] {
          const std::vector<TensorShape> tensors{tensor(shape, 0), tensor(shape, 0, "float16")};
          check_adopted_pages(kHnd, tensors);
        }) == "tensor 1 has elements of float16, and the layout's are bfloat16");
}

TEST_CASE("a refusal shows the layout's dimensions, and those that would fit") {
  CHECK(text_of([&] {
          const std::vector<TensorShape> tensors{tensor({kBlocks, kHeads, kTokens, 2 * kDim}, 0)};
          check_adopted_pages(kHnd, tensors);
        }) ==
        "tensor 0 of the shape [9, 2, 4, 16], in which dimension 0 counts blocks, does not hold the layout's pages: "
        "[k/v 2] [head, token, dim] [2, 4, 8]; they would be pages of KVLayout(dims=\"HND\", pages=\"fused\")");
}

TEST_CASE("raw bytes fit everything") {
  Layout raw;
  raw.piece_bytes = {4096};
  CHECK(fits(raw, tensor({kBlocks, 3, 5, 7}, 0, "float16")));
}
