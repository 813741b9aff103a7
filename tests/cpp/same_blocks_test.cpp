#include "kvpool/transfer/same_blocks.h"

#include <doctest/doctest.h>

#include <functional>
#include <map>
#include <string>

#include "kvpool/base/error.h"
#include "thrown.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

Layout layout_of(std::uint32_t layers, PageFormat format, std::uint32_t tokens) {
  Layout layout;
  layout.block_tokens = tokens;
  layout.format = format;
  layout.piece_bytes.assign(std::size_t{layers} * format.pieces_per_layer(),
                            std::size_t{format.kv_heads} * format.row_bytes() * tokens);
  return layout;
}

PeerMetadata metadata_of(const Layout& layout) {
  PeerMetadata metadata;
  metadata.name = "peer";
  metadata.block_tokens = layout.block_tokens;
  metadata.piece_bytes.assign(layout.piece_bytes.begin(), layout.piece_bytes.end());
  metadata.format = layout.format;
  return metadata;
}

Layout raw_of(std::size_t bytes, std::uint32_t tokens) {
  Layout layout;
  layout.block_tokens = tokens;
  layout.piece_bytes = {bytes};
  return layout;
}

const Layout kOwn = layout_of(4, {8, 16, DType::kBfloat16, false, false}, 32);

std::string refusal(const Layout& theirs) {
  const auto call = [&] { check_same_blocks(metadata_of(theirs), "peer", kOwn, "own"); };
  CHECK(code_of(call) == ErrorCode::kLayoutMismatch);
  return text_of(call);
}

}  // namespace

TEST_CASE("blocks of one format are equal, however they are stored") {
  Layout discrete = kOwn;
  discrete.aggregated = false;
  CHECK_NOTHROW(check_same_blocks(metadata_of(discrete), "peer", kOwn, "own"));
  CHECK_NOTHROW(check_same_blocks(metadata_of(raw_of(4096, 4)), "peer", raw_of(4096, 4), "own"));
}

TEST_CASE("blocks of the same size and other content are refused, and both sides are described") {
  const std::string own =
      "; own has 4 layers of 8 KV heads x 16 (bfloat16, HND, K and V split), 32 tokens a block, 65536 "
      "bytes";
  const auto says = [&](const char* theirs) { return "the layouts differ: peer has " + std::string(theirs) + own; };
  CHECK(refusal(layout_of(4, {8, 16, DType::kFloat16, false, false}, 32)) ==
        says("4 layers of 8 KV heads x 16 (float16, HND, K and V split), 32 tokens a block, 65536 bytes"));
  CHECK(refusal(layout_of(4, {16, 8, DType::kBfloat16, false, false}, 32)) ==
        says("4 layers of 16 KV heads x 8 (bfloat16, HND, K and V split), 32 tokens a block, 65536 bytes"));
  CHECK(refusal(layout_of(4, {8, 32, DType::kInt8, false, false}, 32)) ==
        says("4 layers of 8 KV heads x 32 (int8, HND, K and V split), 32 tokens a block, 65536 bytes"));
  CHECK(refusal(layout_of(4, {8, 16, DType::kBfloat16, true, false}, 32)) ==
        says("4 layers of 8 KV heads x 16 (bfloat16, NHD, K and V split), 32 tokens a block, 65536 bytes"));
  CHECK(refusal(layout_of(4, {8, 16, DType::kBfloat16, false, true}, 32)) ==
        says("4 layers of 8 KV heads x 16 (bfloat16, HND, K and V fused), 32 tokens a block, 65536 bytes"));
  // As many pieces of as many bytes.
  CHECK(refusal(layout_of(8, {8, 8, DType::kBfloat16, false, true}, 32)) ==
        says("8 layers of 8 KV heads x 8 (bfloat16, HND, K and V fused), 32 tokens a block, 65536 bytes"));
  CHECK(refusal(layout_of(4, {8, 32, DType::kBfloat16, false, false}, 16)) ==
        says("4 layers of 8 KV heads x 32 (bfloat16, HND, K and V split), 16 tokens a block, 65536 bytes"));
  CHECK(refusal(layout_of(2, {8, 32, DType::kBfloat16, false, false}, 32)) ==
        says("2 layers of 8 KV heads x 32 (bfloat16, HND, K and V split), 32 tokens a block, 65536 bytes"));
  CHECK(refusal(raw_of(65536, 32)) == says("raw blocks of 65536 bytes in 1 piece, 32 tokens a block"));
}

TEST_CASE("raw blocks with the same number of pieces do not equal a cache's blocks") {
  Layout raw = kOwn;
  raw.format = {};
  CHECK(refusal(raw).starts_with("the layouts differ: peer has raw blocks of 65536 bytes in 8 pieces"));
}

TEST_CASE("a refusal has the numbers of both sides") {
  try {
    check_same_blocks(metadata_of(layout_of(2, {4, 64, DType::kInt8, false, true}, 16)), "peer", kOwn, "own");
    FAIL("nothing was refused");
  } catch (const Error& error) {
    std::map<std::string, std::int64_t> fields(error.fields().begin(), error.fields().end());
    CHECK(fields["offered_layers"] == 2);
    CHECK(fields["offered_kv_heads"] == 4);
    CHECK(fields["offered_head_dim"] == 64);
    CHECK(fields["offered_block_tokens"] == 16);
    CHECK(fields["offered_bytes"] == 2 * 4 * 128 * 16);
    CHECK(fields["layout_layers"] == 4);
    CHECK(fields["layout_kv_heads"] == 8);
    CHECK(fields["layout_head_dim"] == 16);
    CHECK(fields["layout_block_tokens"] == 32);
    CHECK(fields["layout_bytes"] == 65536);
  }
}

TEST_CASE("ranks may hold other layers and heads of a block, and no other rows") {
  CHECK_NOTHROW(check_same_rows(metadata_of(layout_of(9, {2, 16, DType::kBfloat16, false, false}, 32)), kOwn));
  for (const PageFormat& other :
       {PageFormat{8, 16, DType::kFloat16, false, false}, PageFormat{8, 32, DType::kBfloat16, false, false},
        PageFormat{8, 16, DType::kBfloat16, true, false}, PageFormat{8, 16, DType::kBfloat16, false, true},
        PageFormat{}}) {
    Layout theirs = kOwn;
    theirs.format = other;
    CHECK(code_of([&] { check_same_rows(metadata_of(theirs), kOwn); }) == ErrorCode::kLayoutMismatch);
  }
  Layout tokens = kOwn;
  tokens.block_tokens = 16;
  CHECK(code_of([&] { check_same_rows(metadata_of(tokens), kOwn); }) == ErrorCode::kLayoutMismatch);
}
