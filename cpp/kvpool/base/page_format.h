// The content of a block's pieces: element type, heads, and their order. Two sides may exchange blocks only if their
// formats are equal: equal size is not enough.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace kvpool {

// Peers send these values in their metadata (docs/wire.md).
enum class DType : std::uint8_t {
  kNone = 0,  // raw bytes
  kFloat32 = 1,
  kFloat16 = 2,
  kBfloat16 = 3,
  kFloat8E4M3 = 4,
  kFloat8E5M2 = 5,
  kInt8 = 6,
  kUint8 = 7,
};
inline constexpr DType kDTypeMax = DType::kUint8;

// As Python names them: "bfloat16", "float8_e4m3fn". REQUIRES: dtype <= kDTypeMax.
const char* dtype_name(DType dtype) noexcept;
// Nullopt when no type has this name.
std::optional<DType> dtype_named(std::string_view name) noexcept;
// Bytes of an element; 0 for kNone.
std::uint32_t dtype_bytes(DType dtype) noexcept;

struct PageFormat {
  std::uint32_t kv_heads = 0;  // 0: raw bytes of unknown format; then all fields below are 0
  std::uint32_t head_dim = 0;
  DType dtype = DType::kNone;
  bool tokens_first = false;  // a piece is [token, head, row] (NHD), else [head, token, row] (HND)
  // True: a layer is one piece, whose rows hold K and then V of a token of a head: 2 * head_dim elements. False: a
  // layer is two pieces, K and V, with rows of head_dim elements.
  bool fused = false;

  bool known() const noexcept { return kv_heads > 0; }
  std::uint32_t pieces_per_layer() const noexcept { return fused ? 1 : 2; }
  // One token of one head in a piece.
  std::uint64_t row_bytes() const noexcept {
    return (fused ? 2 : 1) * std::uint64_t{head_dim} * std::uint64_t{dtype_bytes(dtype)};
  }
  bool operator==(const PageFormat&) const = default;
};

// For messages: "4 layers of 8 KV heads x 16 (bfloat16, HND, K and V split), 32 tokens a block, 65536 bytes", or "raw
// blocks of 4096 bytes in 1 piece, 16 tokens a block".
std::string describe_blocks(const PageFormat& format, std::span<const std::uint64_t> piece_bytes,
                            std::uint32_t block_tokens);

}  // namespace kvpool
