// Frames, the units that a link carries. docs/wire.md describes the bytes.
//
//   header 32 bytes | body | tag                                    of a message
//   header 32 bytes | body | tag | payload | end 1 byte | tag       of a data frame
//
// The body is a message; the payload, of data frames only, is block content that the receiver places where the body
// says. On links that authenticate, the first tag covers header and body, and is checked before a byte of the payload
// is placed; the last one covers the whole frame. Each has kTagBytes; other links have none.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvpool {

inline constexpr std::uint16_t kWireVersionMin = 4;
inline constexpr std::uint16_t kWireVersionMax = 4;

enum class FrameKind : std::uint8_t {
  // Link level: never seen by a LinkHandler.
  kPing = 1,
  kPong = 2,
  kBye = 3,
  // During the handshake, in this order: the server's kCapabilities, the client's kMetadata, and the server's
  // kMetadata, which admits the client.
  kCapabilities = 4,  // among others, the Unix socket for peers on the same host
  kMetadata = 5,      // a PeerMetadata, and its descriptors
  kReject = 6,        // instead of peer metadata, or after it: an error, and the end
  // Calls: transfer/peer_calls.h. They carry a verb, and an id of the caller's choice; the answer repeats both.
  kCall = 16,    // the verb, with its request          -> kAnswer or kRefused
  kCancel = 17,  // the caller of this call waits no more  no answer but the call's own
  kLeave = 18,   // this side no longer writes           no answer
  kData = 22,    // block content for transfer `id`      no answer
  // Control messages of NCCL, for one direction; the other direction has another communicator.
  kChannel = 24,  // join me in this communicator                    no answer: NCCL is one
  kPass = 25,     // receive content by NCCL for transfer `id`       -> kPassed
  kHalt = 26,     // I have left the communicator                    no answer
  // From the scheduler of a logical instance to its ranks, and between ranks of two of them.
  kMeet = 48,    // connect to these ranks of a peer                  -> kAnswer or kRefused
  kOrder = 49,   // write these parts of blocks to ranks of a peer    -> kAnswer or kRefused
  kStop = 50,    // end order `id` soon                               no answer but its report
  kDepart = 51,  // a meeting is over: write nothing in it any more -> kAnswer, once this side writes no more either
  kCopy = 52,    // copy blocks to other blocks of yours              -> kAnswer
  kFlush = 53,   // rank to rank: all earlier content is in place   -> kAnswer
  // Answers.
  kAnswer = 32,
  kRefused = 35,
  kPassed = 37,  // also when it was refused
};

struct FrameHeader {
  std::uint32_t body_bytes;
  std::uint8_t kind;
  std::uint8_t flags;           // of kMetadata; of all others 0
  std::uint16_t verb;           // of kCall, kCancel, kAnswer and kRefused; of all others 0
  std::uint64_t sequence;       // of this direction of this link: 1, 2, 3, ...; any other than the next ends the link
  std::uint64_t id;             // of the call or transfer
  std::uint32_t payload_bytes;  // of kData at least 1, of all others 0
  std::uint32_t lifetime_ms;    // of kCall: how long its caller waits, 0 if it does not say; of all others 0
};
static_assert(sizeof(FrameHeader) == 32);

// The byte behind a payload.
enum class PayloadEnd : std::uint8_t {
  kWhole = 0,
  kGivenUp = 1,  // the sender stopped in the middle and filled up with zeros: the payload is invalid
};

// The longest is a request with 4 MiB of tokens, half a million addresses, private bytes and a namespace, or two times
// half a million addresses.
inline constexpr std::size_t kBodyBytesMax = std::size_t{10} << 20;
inline constexpr std::size_t kPayloadBytesMax = std::size_t{16} << 20;  // of one data frame
inline constexpr std::size_t kPrivateBytesMax = std::size_t{1} << 20;
inline constexpr std::size_t kTokenBytesMax = std::size_t{4} << 20;
inline constexpr std::size_t kTagBytes = 16;

// The flags of kMetadata: bit i says that descriptor i comes with it, the bit above them that this side declares the
// network trusted. No other kind has flags.
inline constexpr std::size_t kDescriptorsMax = 4;
inline constexpr std::uint8_t kDescriptorFlags = (1U << kDescriptorsMax) - 1;
inline constexpr std::uint8_t kChecksumFlag = 1U << kDescriptorsMax;

}  // namespace kvpool
