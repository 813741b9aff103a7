// The messages on the link that accompany content sent by NCCL. docs/wire.md describes the bytes.
#pragma once

#include <cstdint>
#include <string>

#include "kvpool/net/wire.h"
#include "kvpool/routes/nccl/nccl_library.h"

namespace kvpool {

// From the sender: join this communicator as rank 1, and leave the previous one.
struct NcclChannelBody {
  std::uint64_t generation = 0;  // grows with each communicator of this direction
  std::uint64_t pass_bytes = 0;  // the largest pass through it
  NcclId id{};
};

// From the sender, with the id of the transfer: the next pass through the communicator.
struct NcclPassBody {
  std::uint64_t generation = 0;
  std::uint64_t number = 0;  // 1, 2, ... within the link
  std::uint64_t lifetime_ms = 0;
  std::uint64_t bytes = 0;
  std::uint64_t message_bytes = 0;
  Bytes data;  // its destination, as the body of a data frame
};

enum class NcclOutcome : std::uint8_t {
  kPlaced = 0,
  kRefused = 1,  // the sender may not write these blocks: nothing was received
  kFailed = 2,   // NCCL or the GPU failed, or the sender has halted
  kUnable = 3,   // the receiver failed, and a retry would fail as well
};

// From the receiver, once for each pass. If the content was not placed, the receiver has left the communicator. Number
// 0 reports that a communicator could not be made; its generation is the id then.
struct NcclPassedBody {
  std::uint64_t number = 0;
  NcclOutcome outcome = NcclOutcome::kFailed;
  std::string why;  // empty if it was placed
};

Bytes write_body(const NcclChannelBody& body);
Bytes write_body(const NcclPassBody& body);
Bytes write_body(const NcclPassedBody& body);
Bytes write_halt(std::uint64_t generation);
// Throw Error kProtocol. They do not check the blocks of a pass: see read_data_body.
NcclChannelBody read_channel(std::span<const std::byte> body);
NcclPassBody read_pass(std::span<const std::byte> body);
NcclPassedBody read_passed(std::span<const std::byte> body);
std::uint64_t read_halt(std::span<const std::byte> body);

}  // namespace kvpool
