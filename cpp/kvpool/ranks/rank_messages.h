// The bodies of messages from a scheduler to its ranks, and between ranks: docs/wire.md. Reading checks format and
// limits; the rank checks that the blocks and strips exist.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kvpool/base/address.h"
#include "kvpool/net/connect/peer_metadata.h"
#include "kvpool/net/wire.h"
#include "kvpool/ranks/rank_group.h"

namespace kvpool {

inline constexpr std::size_t kOrderChannelsMax = kRanksMax;
inline constexpr std::size_t kOrderStripsMax = 65536;  // of all channels together

// Connect to these ranks of a peer: their channels belong to this meeting.
struct MeetBody {
  std::uint64_t meeting = 0;
  std::string peer;  // for people
  std::uint64_t lifetime_ms = 0;
  std::vector<MetadataRank> ranks;
};

// Write these parts of the blocks `from` into the blocks `to`.
struct OrderBody {
  std::uint64_t meeting = 0;
  bool merge = true;
  std::uint64_t lifetime_ms = 0;
  std::vector<ChannelWrite> channels;
  std::vector<Address> from;  // of this instance
  std::vector<Address> to;    // as many of the peer's
};

struct ReportBody {
  std::uint64_t calls = 0;
  std::uint64_t bytes = 0;
};

struct DepartBody {
  std::uint64_t meeting = 0;
};

struct CopyBody {
  std::vector<Address> from;
  std::vector<Address> to;  // as many, of another medium
};

Bytes write_body(const MeetBody& body);
Bytes write_body(const OrderBody& body);  // throws kUnsupported above kOrderStripsMax
Bytes write_body(const ReportBody& body);
Bytes write_body(const DepartBody& body);
Bytes write_body(const CopyBody& body);

// Throw Error kProtocol.
MeetBody read_meet(std::span<const std::byte> bytes);
OrderBody read_order(std::span<const std::byte> bytes);
ReportBody read_report(std::span<const std::byte> bytes);
DepartBody read_depart(std::span<const std::byte> bytes);
CopyBody read_copy(std::span<const std::byte> bytes);

}  // namespace kvpool
