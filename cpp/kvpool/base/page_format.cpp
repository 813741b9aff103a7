#include "kvpool/base/page_format.h"

#include <array>
#include <cstddef>

namespace kvpool {
namespace {

struct DTypeFacts {
  const char* name;
  std::uint32_t bytes;
};

constexpr std::array<DTypeFacts, 8> kDTypes{{{"bytes", 0},
                                             {"float32", 4},
                                             {"float16", 2},
                                             {"bfloat16", 2},
                                             {"float8_e4m3fn", 1},
                                             {"float8_e5m2", 1},
                                             {"int8", 1},
                                             {"uint8", 1}}};
static_assert(kDTypes.size() == static_cast<std::size_t>(kDTypeMax) + 1);

std::string counted(std::uint64_t n, const char* what) { return std::to_string(n) + " " + what + (n == 1 ? "" : "s"); }

}  // namespace

const char* dtype_name(DType dtype) noexcept { return kDTypes[static_cast<std::size_t>(dtype)].name; }

std::optional<DType> dtype_named(std::string_view name) noexcept {
  for (std::size_t i = 1; i < kDTypes.size(); ++i) {
    if (name == kDTypes[i].name) return static_cast<DType>(i);
  }
  return std::nullopt;
}

std::uint32_t dtype_bytes(DType dtype) noexcept { return kDTypes[static_cast<std::size_t>(dtype)].bytes; }

std::string describe_blocks(const PageFormat& format, std::span<const std::uint64_t> piece_bytes,
                            std::uint32_t block_tokens) {
  std::uint64_t bytes = 0;
  for (const std::uint64_t piece : piece_bytes) bytes += piece;
  const std::string tokens = counted(block_tokens, "token") + " a block";
  if (!format.known()) {
    return "raw blocks of " + counted(bytes, "byte") + " in " + counted(piece_bytes.size(), "piece") + ", " + tokens;
  }
  return counted(piece_bytes.size() / format.pieces_per_layer(), "layer") + " of " +
         counted(format.kv_heads, "KV head") + " x " + std::to_string(format.head_dim) + " (" +
         dtype_name(format.dtype) + ", " + (format.tokens_first ? "NHD" : "HND") + ", K and V " +
         (format.fused ? "fused" : "split") + "), " + tokens + ", " + counted(bytes, "byte");
}

}  // namespace kvpool
