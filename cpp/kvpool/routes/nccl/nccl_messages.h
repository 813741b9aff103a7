// What is said on the link about content that travels by NCCL. docs/wire.md describes the bytes.
#pragma once

#include <cstdint>
#include <string>

#include "kvpool/net/wire.h"
#include "kvpool/routes/nccl/nccl_library.h"

namespace kvpool {

// Of the sender: be rank 1 of this communicator. Ends the one before.
struct NcclChannelBody {
  std::uint64_t generation = 0;  // rises with each communicator of this direction
  std::uint64_t pass_bytes = 0;  // no pass in it will have more
  NcclId id{};
};

// Of the sender, with the id of the transfer: this comes next in the communicator.
struct NcclPassBody {
  std::uint64_t generation = 0;
  std::uint64_t number = 0;  // 1, 2, ... within the link
  std::uint64_t lifetime_ms = 0;
  std::uint64_t bytes = 0;
  std::uint64_t message_bytes = 0;
  Bytes data;  // where it goes: as the body of a data frame
};

enum class NcclOutcome : std::uint8_t {
  kPlaced = 0,
  kRefused = 1,  // not the sender's blocks: nothing was received
  kFailed = 2,   // NCCL or the GPU; or the sender has halted
  kUnable = 3,   // the receiver cannot, and will not be able to when it is tried again
};

// Of the receiver, once for each pass. When it was not placed, the receiver has left the communicator. Of a
// communicator that could not be made it says so with number 0, and the generation for an id.
struct NcclPassedBody {
  std::uint64_t number = 0;
  NcclOutcome outcome = NcclOutcome::kFailed;
  std::string why;  // unless it was placed
};

Bytes write_body(const NcclChannelBody& body);
Bytes write_body(const NcclPassBody& body);
Bytes write_body(const NcclPassedBody& body);
Bytes write_halt(std::uint64_t generation);
// Throw Error kProtocol. What a pass says of blocks is not checked yet: see read_data_body.
NcclChannelBody read_channel(std::span<const std::byte> body);
NcclPassBody read_pass(std::span<const std::byte> body);
NcclPassedBody read_passed(std::span<const std::byte> body);
std::uint64_t read_halt(std::span<const std::byte> body);

}  // namespace kvpool
