// What the entry of a page on disk says about it, so that the index can be built again: its tokens, and the entry of
// the page before it in its prompt; the first page of a prompt has the namespace instead.
//
//   u8   version, 1
//   u8   whether it is the first page of its prompt: 1 or 0
//   u32  slot of the page before      both 0 for the first page
//   u64  generation of that entry
//   u32  number of tokens, and as many i32
//   u32  bytes of the namespace, and those; only of a first page
//
// Little-endian.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "kvpool/index/token_run.h"

namespace kvpool {

// An entry on disk.
struct DiskPlace {
  std::uint32_t slot = 0;
  std::uint64_t generation = 0;
  bool operator==(const DiskPlace&) const = default;
};

struct DiskRecord {
  std::optional<DiskPlace> parent;    // none: it is the first page of its prompt
  std::span<const std::byte> tokens;  // as they are stored: perhaps not aligned
  std::string_view name_space;        // of a first page
};

// `tokens`: of one page.
std::vector<std::byte> encode_record(const std::optional<DiskPlace>& parent, std::span<const Token> tokens,
                                     std::string_view name_space);
// Nothing if it is no such record of a page with so many tokens. The result refers to `bytes`.
std::optional<DiskRecord> decode_record(std::span<const std::byte> bytes, std::uint32_t page_tokens) noexcept;
// How long a record is at most, without the namespace.
std::size_t record_bytes(std::uint32_t page_tokens) noexcept;

}  // namespace kvpool
