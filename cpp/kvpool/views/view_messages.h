// The bodies of the calls that view, unview and attend: docs/wire.md. Reading checks format, limits and that ranges are
// in order; whether they name something that exists is checked where that is known.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kvpool/attention/partial.h"
#include "kvpool/attention/token_range.h"
#include "kvpool/base/address.h"
#include "kvpool/base/page_format.h"
#include "kvpool/base/priority.h"
#include "kvpool/net/wire.h"
#include "kvpool/sequences/block_runs.h"

namespace kvpool {

struct ViewBody {
  std::uint64_t view = 0;   // chosen by the caller; the first call with it opens the view
  bool by_mapping = false;  // the caller may read the blocks through a mapping of the receiver's memory
  std::uint64_t first = 0;  // block of the sequence that the first address is for
  std::vector<Address> addresses;
};

struct UnviewBody {
  std::uint64_t view = 0;
  BlockRange blocks;  // a view without blocks is closed
};

struct AttendBody {
  struct Item {
    std::uint64_t view = 0;
    std::uint32_t query_tokens = 1;
    std::uint64_t query_begin = 0;
    std::vector<TokenRange> ranges;  // not empty, ascending, and no two of them touch
  };
  std::uint32_t layer = 0;
  std::uint32_t query_heads = 0;
  DType query_dtype = DType::kNone;
  std::optional<float> scale;  // nullopt: 1 / sqrt(head_dim)
  bool causal = true;
  Priority priority = Priority::kDecode;
  std::vector<Item> items;
  std::vector<std::byte> q;  // [query tokens of all items, query head, head_dim]
};

struct AttendedBody {
  std::uint32_t layer = 0;
  // Of each item: view, and the nodes of its part.
  struct Item {
    std::uint64_t view = 0;
    std::vector<PartialNode> nodes;
  };
  std::vector<Item> items;
};

// The longest answer to these ranges, in bytes.
std::size_t attended_bytes(std::span<const TokenRange> ranges, const PartialShape& shape) noexcept;
inline constexpr std::size_t kAttendItemsMax = 4096;   // of one request
inline constexpr std::size_t kAttendRangesMax = 8192;  // of all its items together
// Of one answer, besides what attended_bytes() counts.
inline constexpr std::size_t kAttendedHeaderBytes = 64;

Bytes write_body(const ViewBody& body);
Bytes write_body(const UnviewBody& body);
Bytes write_body(const AttendBody& body);
Bytes write_body(const AttendedBody& body);

// Throw Error kProtocol.
ViewBody read_view(std::span<const std::byte> bytes);
UnviewBody read_unview(std::span<const std::byte> bytes);
AttendBody read_attend(std::span<const std::byte> bytes);
// `asked`: the answer must be to this, layer, views and ranges alike.
AttendedBody read_attended(std::span<const std::byte> bytes, const AttendBody& asked, std::uint32_t head_dim);

}  // namespace kvpool
