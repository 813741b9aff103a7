#include "kvpool/net/frame_tag.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "kvpool/base/error.h"
#include "kvpool/net/connect/handshake_messages.h"

namespace kvpool {

FrameTag::FrameTag(TagKind kind, const Key& key) : kind_(kind) {
  if (kind == TagKind::kMac) hash_.emplace(std::span<const std::byte, 32>(key));
}

void FrameTag::begin() noexcept {
  crc_ = 0;
  if (kind_ == TagKind::kMac) hash_->reset();
}

void FrameTag::update(const void* data, std::size_t bytes) noexcept {
  if (kind_ == TagKind::kMac) hash_->update(data, bytes);
  if (kind_ == TagKind::kChecksum) crc_ = crc32c(crc_, data, bytes);
}

Tag FrameTag::finish() const noexcept {
  Tag tag{};
  if (kind_ == TagKind::kMac) {
    const Digest digest = hash_->finish();
    std::copy_n(digest.begin(), tag.size(), tag.begin());
  } else {
    std::memcpy(tag.data(), &crc_, sizeof(crc_));
  }
  return tag;
}

Tag FrameTag::given_up(const Tag& first) noexcept {
  constexpr PayloadEnd kEnd = PayloadEnd::kGivenUp;
  begin();
  update(first.data(), first.size());
  update(&kEnd, sizeof(kEnd));
  return finish();
}

namespace {

[[noreturn]] void fail(const std::string& what) {
  throw Error(ErrorCode::kProtocol, "a frame from the peer is malformed: " + what);
}

// The longest body of a frame of this kind; throws for a kind that there is not.
std::size_t body_bytes_max(std::uint8_t kind) {
  switch (static_cast<FrameKind>(kind)) {
    case FrameKind::kPing:
    case FrameKind::kPong:
      return 0;
    case FrameKind::kBye:
    case FrameKind::kCapabilities:
    case FrameKind::kReject:
      return kShortBodyBytesMax;
    case FrameKind::kMetadata:
      return kMetadataBytesMax;
    case FrameKind::kCancel:
    case FrameKind::kLeave:
      return 0;
    case FrameKind::kCall:
    case FrameKind::kData:
    case FrameKind::kChannel:
    case FrameKind::kPass:
    case FrameKind::kHalt:
    case FrameKind::kMeet:
    case FrameKind::kOrder:
    case FrameKind::kStop:
    case FrameKind::kDepart:
    case FrameKind::kCopy:
    case FrameKind::kFlush:
    case FrameKind::kAnswer:
    case FrameKind::kRefused:
    case FrameKind::kPassed:
      return kBodyBytesMax;
  }
  fail("there is no kind " + std::to_string(kind));
}

// Whether frames of this kind name a verb. Answers of ranks name none.
bool has_verb(FrameKind kind) noexcept {
  return kind == FrameKind::kCall || kind == FrameKind::kCancel || kind == FrameKind::kAnswer ||
         kind == FrameKind::kRefused;
}

}  // namespace

void check_body_bytes(const FrameHeader& header, std::size_t most) {
  if (header.body_bytes <= most) return;
  fail("a body of " + std::to_string(header.body_bytes) + " bytes; at most " + std::to_string(most));
}

void check_header(const FrameHeader& header, std::uint64_t sequence) {
  check_body_bytes(header, body_bytes_max(header.kind));
  const bool metadata = header.kind == static_cast<std::uint8_t>(FrameKind::kMetadata);
  if ((header.flags & ~(metadata ? kDescriptorFlags | kChecksumFlag : 0)) != 0) {
    fail("flags " + std::to_string(header.flags) + ", of which some are unknown for kind " +
         std::to_string(header.kind));
  }
  if (header.verb != 0 && !has_verb(static_cast<FrameKind>(header.kind))) {
    fail("verb " + std::to_string(header.verb) + " in kind " + std::to_string(header.kind));
  }
  if (header.lifetime_ms != 0 && header.kind != static_cast<std::uint8_t>(FrameKind::kCall)) {
    fail("a lifetime in kind " + std::to_string(header.kind));
  }
  const bool data = header.kind == static_cast<std::uint8_t>(FrameKind::kData);
  const std::size_t payload_max = data ? kPayloadBytesMax : 0;
  if (header.payload_bytes > payload_max) {
    fail("a payload of " + std::to_string(header.payload_bytes) + " bytes; at most " + std::to_string(payload_max));
  }
  if (data && header.payload_bytes == 0) fail("data without a payload");
  if (header.sequence != sequence) {
    fail("frame " + std::to_string(header.sequence) + " where " + std::to_string(sequence) + " should be");
  }
}

}  // namespace kvpool
