#include "kvpool/views/view_messages.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <string>

#include "kvpool/attention/attend.h"
#include "kvpool/attention/merge_tree.h"
#include "kvpool/base/error.h"
#include "kvpool/transfer/verbs.h"

namespace kvpool {
namespace {

enum ViewBit : std::uint8_t { kByMapping = 1 };
enum AttendBit : std::uint8_t { kCausal = 1, kHasScale = 2 };

constexpr std::size_t kItemBytes = sizeof(std::uint64_t) + sizeof(std::uint32_t);         // of an answer
constexpr std::size_t kNodeBytes = 2 * sizeof(std::uint64_t) + 3 * sizeof(std::uint8_t);  // and its values
constexpr std::uint8_t kSeveralKernels = 0xff;

[[noreturn]] void malformed(const std::string& what) {
  throw Error(ErrorCode::kProtocol, "a message from the peer is malformed: " + what);
}

DType read_query_dtype(WireReader& in) {
  const auto code = in.number<std::uint8_t>();
  const bool known = code == static_cast<std::uint8_t>(DType::kFloat32) ||
                     code == static_cast<std::uint8_t>(DType::kFloat16) ||
                     code == static_cast<std::uint8_t>(DType::kBfloat16);
  if (!known) malformed("queries of type " + std::to_string(code));
  return static_cast<DType>(code);
}

Priority read_priority(WireReader& in) {
  const auto code = in.number<std::uint8_t>();
  if (code > static_cast<std::uint8_t>(Priority::kBackground)) malformed("priority " + std::to_string(code));
  return static_cast<Priority>(code);
}

std::optional<float> read_scale(WireReader& in, bool has_scale) {
  const float scale = std::bit_cast<float>(in.number<std::uint32_t>());
  if (!std::isfinite(scale)) malformed("a scale that is not finite");
  return has_scale ? std::optional(scale) : std::nullopt;
}

std::vector<TokenRange> read_ranges(WireReader& in) {
  std::vector<TokenRange> ranges = in.array<TokenRange>(kAttendRangesMax);
  // Ranges that touch are one: the nodes of a part do not depend on how its tokens were named.
  std::uint64_t end = 0;
  for (const TokenRange& range : ranges) {
    if ((range.begin <= end && end > 0) || range.begin >= range.end || range.end > kSequenceTokensMax) {
      malformed("token ranges that are empty or out of order");
    }
    end = range.end;
  }
  return ranges;
}

std::optional<KernelId> read_kernel(WireReader& in) {
  const auto isa = in.number<std::uint8_t>();
  const auto version = in.number<std::uint8_t>();
  if (isa == kSeveralKernels) return std::nullopt;
  if (isa > static_cast<std::uint8_t>(kAttentionIsaMax)) malformed("kernel " + std::to_string(isa));
  return KernelId{static_cast<AttentionIsa>(isa), version};
}

std::vector<PartialNode> read_nodes(WireReader& in, const PartialShape& shape, std::span<const TokenRange> asked) {
  std::vector<PartialNode> nodes;
  const auto next_node = [&](const TokenRange& range) {
    if (in.number<std::uint64_t>() != range.begin || in.number<std::uint64_t>() != range.end) {
      malformed("a part of other tokens than it was asked for");
    }
    const auto exact = in.number<std::uint8_t>();
    if (exact > 1) malformed("unknown flags " + std::to_string(exact));
    PartialNode node{range, read_kernel(in), exact == 1, std::vector<float>(PartialNode::floats(shape))};
    if (node.exact && !node.kernel) malformed("an exact node of several kernels");
    const auto bytes = in.take(node.values.size() * sizeof(float));
    std::memcpy(node.values.data(), bytes.data(), bytes.size());
    nodes.push_back(std::move(node));
  };
  const auto count = in.number<std::uint32_t>();
  for (const TokenRange& range : asked) {
    for (const TokenRange& node : maximal_nodes(range)) next_node(node);
  }
  if (nodes.size() != count) malformed("a part of " + std::to_string(count) + " nodes");
  return nodes;
}

}  // namespace

std::size_t attended_bytes(std::span<const TokenRange> ranges, const PartialShape& shape) noexcept {
  std::size_t nodes = 0;
  for (const TokenRange& range : ranges) nodes += maximal_nodes(range).size();
  return kItemBytes + nodes * (kNodeBytes + PartialNode::floats(shape) * sizeof(float));
}

Bytes write_body(const ViewBody& body) {
  Bytes out;
  out.reserve(2 * sizeof(std::uint64_t) + sizeof(std::uint32_t) + body.addresses.size() * sizeof(Address));
  WireWriter(out)
      .number(body.view)
      .number(static_cast<std::uint8_t>(body.by_mapping ? kByMapping : 0))
      .number(body.first)
      .array(std::span<const Address>(body.addresses));
  return out;
}

ViewBody read_view(std::span<const std::byte> bytes) {
  WireReader in(bytes);
  ViewBody body;
  body.view = in.number<std::uint64_t>();
  const auto bits = in.number<std::uint8_t>();
  if ((bits & ~kByMapping) != 0) malformed("unknown flags " + std::to_string(bits));
  body.by_mapping = (bits & kByMapping) != 0;
  body.first = in.number<std::uint64_t>();
  body.addresses = in.array<Address>(kAddressesMax);
  in.finish();
  if (body.first > kSequenceTokensMax) malformed("block " + std::to_string(body.first) + " of a sequence");
  return body;
}

Bytes write_body(const UnviewBody& body) {
  Bytes out;
  WireWriter(out).number(body.view).number(body.blocks.first).number(body.blocks.count);
  return out;
}

UnviewBody read_unview(std::span<const std::byte> bytes) {
  WireReader in(bytes);
  UnviewBody body;
  body.view = in.number<std::uint64_t>();
  body.blocks.first = in.number<std::uint64_t>();
  body.blocks.count = in.number<std::uint64_t>();
  in.finish();
  if (body.blocks.count > UINT64_MAX - body.blocks.first) malformed("blocks behind all sequences");
  return body;
}

Bytes write_body(const AttendBody& body) {
  Bytes out;
  out.reserve(64 + body.items.size() * 64 + body.q.size());
  const int bits = (body.causal ? kCausal : 0) | (body.scale ? kHasScale : 0);
  WireWriter writer(out);
  writer.number(body.layer)
      .number(body.query_heads)
      .number(static_cast<std::uint8_t>(body.query_dtype))
      .number(static_cast<std::uint8_t>(bits))
      .number(static_cast<std::uint8_t>(body.priority))
      .number(std::bit_cast<std::uint32_t>(body.scale.value_or(0)))
      .number(static_cast<std::uint32_t>(body.items.size()));
  for (const AttendBody::Item& item : body.items) {
    writer.number(item.view)
        .number(item.query_tokens)
        .number(item.query_begin)
        .array(std::span<const TokenRange>(item.ranges));
  }
  writer.blob(body.q);
  return out;
}

AttendBody read_attend(std::span<const std::byte> bytes) {
  WireReader in(bytes);
  AttendBody body;
  body.layer = in.number<std::uint32_t>();
  body.query_heads = in.number<std::uint32_t>();
  if (body.query_heads == 0) malformed("no query heads");
  body.query_dtype = read_query_dtype(in);
  const auto bits = in.number<std::uint8_t>();
  if ((bits & ~(kCausal | kHasScale)) != 0) malformed("unknown flags " + std::to_string(bits));
  body.causal = (bits & kCausal) != 0;
  body.priority = read_priority(in);
  body.scale = read_scale(in, (bits & kHasScale) != 0);
  const auto items = in.number<std::uint32_t>();
  if (items > kAttendItemsMax) malformed("a list of " + std::to_string(items));
  std::size_t ranges = 0;
  for (std::uint32_t i = 0; i < items; ++i) {
    AttendBody::Item& item = body.items.emplace_back();
    item.view = in.number<std::uint64_t>();
    item.query_tokens = in.number<std::uint32_t>();
    item.query_begin = in.number<std::uint64_t>();
    item.ranges = read_ranges(in);
    ranges += item.ranges.size();
    if (ranges > kAttendRangesMax) malformed("more than " + std::to_string(kAttendRangesMax) + " token ranges");
    if (item.query_tokens == 0 || item.query_tokens > kQueryTokensMax) {
      malformed(std::to_string(item.query_tokens) + " query tokens");
    }
    if (item.query_begin > kSequenceTokensMax) malformed("a query behind all sequences");
    if (item.ranges.empty()) malformed("no tokens to attend to");
  }
  const auto q = in.blob(kBodyBytesMax);
  body.q.assign(q.begin(), q.end());
  in.finish();
  return body;
}

Bytes write_body(const AttendedBody& body) {
  Bytes out;
  std::size_t floats = 0;
  for (const AttendedBody::Item& item : body.items) {
    for (const PartialNode& node : item.nodes) floats += node.values.size() + 8;
  }
  out.reserve(kAttendedHeaderBytes + body.items.size() * kItemBytes + floats * sizeof(float));
  WireWriter writer(out);
  writer.number(body.layer).number(static_cast<std::uint32_t>(body.items.size()));
  for (const AttendedBody::Item& item : body.items) {
    writer.number(item.view).number(static_cast<std::uint32_t>(item.nodes.size()));
    for (const PartialNode& node : item.nodes) {
      writer.number(node.range.begin)
          .number(node.range.end)
          .number(static_cast<std::uint8_t>(node.exact ? 1 : 0))
          .number(node.kernel ? static_cast<std::uint8_t>(node.kernel->isa) : kSeveralKernels)
          .number(node.kernel ? node.kernel->version : std::uint8_t{0})
          .raw(node.values.data(), node.values.size() * sizeof(float));
    }
  }
  return out;
}

AttendedBody read_attended(std::span<const std::byte> bytes, const AttendBody& asked, std::uint32_t head_dim) {
  WireReader in(bytes);
  AttendedBody body;
  body.layer = in.number<std::uint32_t>();
  if (body.layer != asked.layer) malformed("attention of layer " + std::to_string(body.layer));
  if (in.number<std::uint32_t>() != asked.items.size()) malformed("parts of another number of sequences");
  for (const AttendBody::Item& item : asked.items) {
    if (in.number<std::uint64_t>() != item.view) malformed("a part of another view");
    const PartialShape shape{item.query_tokens, asked.query_heads, head_dim};
    body.items.push_back({item.view, read_nodes(in, shape, item.ranges)});
  }
  in.finish();
  return body;
}

}  // namespace kvpool
