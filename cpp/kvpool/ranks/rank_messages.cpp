#include "kvpool/ranks/rank_messages.h"

#include "kvpool/base/error.h"
#include "kvpool/transfer/messages.h"

namespace kvpool {
namespace {

[[noreturn]] void malformed(const std::string& what) {
  throw Error(ErrorCode::kProtocol, "a message between scheduler and rank is malformed: " + what);
}

void check_same_length(const std::vector<Address>& from, const std::vector<Address>& to) {
  if (from.size() == to.size()) return;
  malformed(std::to_string(from.size()) + " blocks to " + std::to_string(to.size()));
}

ChannelWrite read_channel(WireReader& in, std::size_t strips_max) {
  static_assert(sizeof(BlockStrip) == 24, "no padding: it goes out as it is");
  ChannelWrite channel;
  channel.to_rank = in.number<std::uint32_t>();
  channel.strips = in.array<BlockStrip>(strips_max);
  for (const BlockStrip& strip : channel.strips) {
    if (__builtin_add_overflow(channel.bytes, strip.bytes, &channel.bytes))
      malformed("the sum of its strips overflows");
  }
  return channel;
}

}  // namespace

Bytes write_body(const MeetBody& body) {
  Bytes out;
  WireWriter writer(out);
  writer.number(body.meeting).text(body.peer).number(body.lifetime_ms);
  writer.number(static_cast<std::uint32_t>(body.ranks.size()));
  for (const MetadataRank& rank : body.ranks) writer.number(rank.rank).number(rank.incarnation).text(rank.address);
  return out;
}

MeetBody read_meet(std::span<const std::byte> bytes) {
  WireReader in(bytes);
  MeetBody body;
  body.meeting = in.number<std::uint64_t>();
  body.peer = in.text(kNameBytesMax);
  body.lifetime_ms = in.number<std::uint64_t>();
  const auto ranks = in.number<std::uint32_t>();
  if (ranks > kRanksMax) malformed(std::to_string(ranks) + " ranks to meet");
  for (std::uint32_t i = 0; i < ranks; ++i) {
    MetadataRank rank;
    rank.rank = in.number<std::uint32_t>();
    rank.incarnation = in.number<std::uint64_t>();
    rank.address = in.text(kMetadataAddressBytesMax);
    body.ranks.push_back(std::move(rank));
  }
  in.finish();
  return body;
}

Bytes write_body(const OrderBody& body) {
  Bytes out;
  std::size_t strips = 0;
  for (const ChannelWrite& channel : body.channels) strips += channel.strips.size();
  if (strips > kOrderStripsMax) {
    throw Error(ErrorCode::kUnsupported, "one write of a rank would have " + std::to_string(strips) +
                                             " strips a block; at most " + std::to_string(kOrderStripsMax) +
                                             ": send layer by layer");
  }
  out.reserve(64 + strips * sizeof(BlockStrip) + 2 * body.from.size() * sizeof(Address));
  WireWriter writer(out);
  writer.number(body.meeting).number(static_cast<std::uint8_t>(body.merge ? 1 : 0)).number(body.lifetime_ms);
  writer.number(static_cast<std::uint32_t>(body.channels.size()));
  for (const ChannelWrite& channel : body.channels) {
    writer.number(channel.to_rank).array(std::span<const BlockStrip>(channel.strips));
  }
  writer.array(std::span<const Address>(body.from)).array(std::span<const Address>(body.to));
  return out;
}

OrderBody read_order(std::span<const std::byte> bytes) {
  WireReader in(bytes);
  OrderBody body;
  body.meeting = in.number<std::uint64_t>();
  const auto merge = in.number<std::uint8_t>();
  if (merge > 1) malformed("unknown flags " + std::to_string(merge));
  body.merge = merge == 1;
  body.lifetime_ms = in.number<std::uint64_t>();
  const auto channels = in.number<std::uint32_t>();
  if (channels > kOrderChannelsMax) malformed(std::to_string(channels) + " channels in one order");
  std::size_t strips_left = kOrderStripsMax;
  for (std::uint32_t i = 0; i < channels; ++i) {
    body.channels.push_back(read_channel(in, strips_left));
    strips_left -= body.channels.back().strips.size();
  }
  body.from = in.array<Address>(kAddressesMax);
  body.to = in.array<Address>(kAddressesMax);
  check_same_length(body.from, body.to);
  in.finish();
  return body;
}

Bytes write_body(const ReportBody& body) {
  Bytes out;
  WireWriter(out).number(body.calls).number(body.bytes);
  return out;
}

ReportBody read_report(std::span<const std::byte> bytes) {
  WireReader in(bytes);
  ReportBody body;
  body.calls = in.number<std::uint64_t>();
  body.bytes = in.number<std::uint64_t>();
  in.finish();
  return body;
}

Bytes write_body(const DepartBody& body) {
  Bytes out;
  WireWriter(out).number(body.meeting);
  return out;
}

DepartBody read_depart(std::span<const std::byte> bytes) {
  WireReader in(bytes);
  const DepartBody body{in.number<std::uint64_t>()};
  in.finish();
  return body;
}

Bytes write_body(const CopyBody& body) {
  Bytes out;
  out.reserve(8 + 2 * body.from.size() * sizeof(Address));
  WireWriter(out).array(std::span<const Address>(body.from)).array(std::span<const Address>(body.to));
  return out;
}

CopyBody read_copy(std::span<const std::byte> bytes) {
  WireReader in(bytes);
  CopyBody body;
  body.from = in.array<Address>(kAddressesMax);
  body.to = in.array<Address>(kAddressesMax);
  check_same_length(body.from, body.to);
  in.finish();
  return body;
}

}  // namespace kvpool
