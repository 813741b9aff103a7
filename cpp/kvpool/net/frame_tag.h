// The tags that protect a frame's bytes on the wire, and the check of a frame's header.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "kvpool/base/digest.h"
#include "kvpool/net/connect/handshake.h"
#include "kvpool/net/frame.h"

namespace kvpool {

enum class TagKind : std::uint8_t {
  kNone,      // Unix sockets: the kernel copies the bytes
  kChecksum,  // CRC-32C, then zeros: networks that both sides declare trusted
  kMac,       // the first 16 bytes of a keyed BLAKE3
};

using Tag = std::array<std::byte, kTagBytes>;

// The tags of one direction of a link. For each frame call begin(), update() over header and body, finish() for the
// first tag; of a data frame then update() over payload and end byte, and finish() for the last one.
class FrameTag {
 public:
  FrameTag(TagKind kind, const Key& key);

  TagKind kind() const noexcept { return kind_; }
  std::size_t bytes() const noexcept { return kind_ == TagKind::kNone ? 0 : kTagBytes; }
  // From the next frame on. REQUIRES: it was made with kMac, and a MAC gives way to a checksum only.
  void use_checksum() noexcept { kind_ = TagKind::kChecksum; }

  void begin() noexcept;
  void update(const void* data, std::size_t bytes) noexcept;
  Tag finish() const noexcept;  // over all bytes since begin(); more may follow
  // The last tag of a frame whose payload was given up. It covers the frame's first tag instead of the payload, which
  // is dropped, so it is valid for this frame only. Call begin() next.
  Tag given_up(const Tag& first) noexcept;

 private:
  TagKind kind_;
  std::uint32_t crc_ = 0;
  std::optional<KeyedHash> hash_;
};

// Throws Error kProtocol: a kind that this version does not know, a length above its limit, a payload where none
// belongs, data without one, a sequence number that is not the next one. The lengths of an accepted header are safe to
// allocate.
void check_header(const FrameHeader& header, std::uint64_t sequence);
// Throws Error kProtocol when the body is longer than that.
void check_body_bytes(const FrameHeader& header, std::size_t most);

}  // namespace kvpool
