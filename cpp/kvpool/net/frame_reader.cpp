#include "kvpool/net/frame_reader.h"

#include <limits.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "kvpool/base/check.h"
#include "kvpool/net/connection_error.h"
#include "kvpool/net/sock_pass.h"

namespace kvpool {
namespace {

constexpr std::size_t kCallBytes =
    std::size_t{256} << 10;  // of payload, by one system call: what is in the caches is not sent out of them
constexpr std::size_t kBodyStepBytes = std::size_t{256}
                                       << 10;  // a peer that promises a body gets memory as it sends it
constexpr std::uint64_t kLargePayload = std::uint64_t{16} << 10;

bool has_large_payload(const FrameHeader& header) noexcept { return header.payload_bytes > kLargePayload; }
bool is_data(const FrameHeader& header) noexcept { return header.kind == static_cast<std::uint8_t>(FrameKind::kData); }

}  // namespace

FrameReader::FrameReader(int fd, TagKind tag, const Key& key, bool descriptors, FrameSink& sink)
    : fd_(fd),
      sink_(sink),
      tag_(tag, key),
      descriptors_wanted_(descriptors),
      buffer_(std::make_unique_for_overwrite<std::byte[]>(kBufferBytes)) {}

void FrameReader::put_early(std::span<const std::byte> bytes, std::vector<Descriptor> descriptors) {
  KVPOOL_CHECK(bytes.size() <= kBufferBytes && sequence_ == 0);
  if (!bytes.empty()) std::memcpy(buffer_.get(), bytes.data(), bytes.size());
  end_ = bytes.size();
  descriptors_ = std::move(descriptors);
}

std::vector<Descriptor> FrameReader::take_descriptors() noexcept {
  descriptors_wanted_ = false;
  return std::move(descriptors_);
}

// ---- what has been read

bool FrameReader::step() {
  while (true) {
    switch (state_) {
      case State::kHeader:
        if (!begin_frame()) return false;
        break;
      case State::kBody:
        if (!take_body()) return false;
        if (state_ == State::kHeader) return true;
        break;
      case State::kLargeBody:
        if (!take_large_body()) return false;
        if (state_ == State::kHeader) return true;
        break;
      case State::kPayload:
        if (!take_payload()) return false;
        break;
      case State::kEnd:
        return finish_payload();
    }
  }
}

bool FrameReader::begin_frame() {
  if (buffered() < sizeof(header_)) return false;
  const auto bytes = take(sizeof(header_));
  std::memcpy(&header_, bytes.data(), sizeof(header_));
  check_header(header_, sequence_ + 1);
  check_body_bytes(header_, sink_.body_bytes_max(header_));
  ++sequence_;
  tag_.begin();
  tag_.update(&header_, sizeof(header_));
  const std::size_t head = header_.body_bytes + tag_.bytes();
  const std::size_t next = sizeof(PayloadEnd) + tag_.bytes() + sizeof(header_) + head;
  ahead_ = std::min(has_large_payload(header_) ? next : std::max(next, kAheadBytes), kBufferBytes);
  if (head <= kBufferBytes) {
    state_ = State::kBody;
  } else {
    body_.clear();
    body_.reserve(header_.body_bytes);
    state_ = State::kLargeBody;
  }
  return true;
}

bool FrameReader::take_body() {
  if (buffered() < header_.body_bytes + tag_.bytes()) return false;
  const auto body = take(header_.body_bytes);
  tag_.update(body.data(), body.size());
  check_first_tag();
  if (is_data(header_)) {
    begin_payload(sink_.on_data_frame(header_, body));
    return true;
  }
  body_.assign(body.begin(), body.end());
  state_ = State::kHeader;
  sink_.on_frame(header_, std::move(body_));
  return true;
}

// What is left of it is read straight into its own memory.
bool FrameReader::take_large_body() {
  const auto bytes = take(std::min(buffered(), header_.body_bytes - body_.size()));
  tag_.update(bytes.data(), bytes.size());
  body_.insert(body_.end(), bytes.begin(), bytes.end());
  if (body_.size() < header_.body_bytes || buffered() < tag_.bytes()) return false;
  check_first_tag();
  Bytes body = std::move(body_);
  if (is_data(header_)) {
    begin_payload(sink_.on_data_frame(header_, body));
    return true;
  }
  state_ = State::kHeader;
  sink_.on_frame(header_, std::move(body));
  return true;
}

void FrameReader::check_first_tag() {
  const auto theirs = take(tag_.bytes());
  if (theirs.empty()) return;
  first_tag_ = tag_.finish();
  if (!equal_secret(first_tag_.data(), theirs.data(), theirs.size())) throw_wrong_tag();
}

void FrameReader::throw_wrong_tag() const {
  throw Error(ErrorCode::kProtocol, tag_.kind() == TagKind::kMac
                                        ? "a frame from the peer has a wrong authentication code"
                                        : "a frame from the peer has a wrong checksum");
}

void FrameReader::begin_payload(Placement&& placement) {
  placement_ = std::move(placement);
  std::uint64_t room = 0;
  for (const iovec& piece : placement_.pieces) room += piece.iov_len;
  dropped_ = placement_.pieces.empty();
  KVPOOL_CHECK(dropped_ || room == header_.payload_bytes);
  piece_ = 0;
  piece_filled_ = 0;
  payload_left_ = header_.payload_bytes;
  state_ = State::kPayload;  // from here on end() tells the sink
  if (dropped_) scratch_.resize(kBufferBytes);
  call_.reserve(std::min<std::size_t>(placement_.pieces.size(), IOV_MAX) + 2);
}

// Bytes of the payload that came along with an earlier read.
bool FrameReader::take_payload() {
  while (payload_left_ > 0 && buffered() > 0) {
    std::size_t bytes = std::min<std::uint64_t>(payload_left_, buffered());
    if (!dropped_) {
      const iovec& piece = placement_.pieces[piece_];
      if (piece_filled_ == piece.iov_len) {  // an empty one
        ++piece_;
        piece_filled_ = 0;
        continue;
      }
      bytes = std::min(bytes, piece.iov_len - piece_filled_);
      std::memcpy(static_cast<std::byte*>(piece.iov_base) + piece_filled_, buffer_.get() + begin_, bytes);
    }
    begin_ += bytes;
    if (dropped_) {
      tag_.update(buffer_.get() + begin_ - bytes, bytes);
      payload_left_ -= bytes;
    } else {
      advance_payload(bytes);
    }
  }
  if (payload_left_ > 0) return false;
  state_ = State::kEnd;
  return true;
}

bool FrameReader::finish_payload() {
  if (buffered() < sizeof(PayloadEnd) + tag_.bytes()) return false;
  const auto end = static_cast<PayloadEnd>(take(sizeof(PayloadEnd))[0]);
  const bool given_up = end == PayloadEnd::kGivenUp;
  const auto theirs = take(tag_.bytes());
  tag_.update(&end, sizeof(end));
  const Tag tag = given_up ? tag_.given_up(first_tag_) : tag_.finish();
  const bool right = theirs.empty() || equal_secret(tag.data(), theirs.data(), theirs.size());
  state_ = State::kHeader;
  const std::uint64_t token = placement_.token;
  placement_.pieces.clear();
  if (!dropped_) sink_.on_placed_frame(token, right && end == PayloadEnd::kWhole);
  if (!right) throw_wrong_tag();
  if (!given_up && end != PayloadEnd::kWhole) {
    throw Error(ErrorCode::kProtocol, "a payload from the peer ends in no way that there is");
  }
  return true;
}

void FrameReader::end() noexcept {
  const bool placing = is_data(header_) && !dropped_ && (state_ == State::kPayload || state_ == State::kEnd);
  state_ = State::kHeader;
  if (!placing) return;
  try {
    sink_.on_placed_frame(placement_.token, false);
  } catch (...) {
    // The link ends anyway.
  }
}

// ---- reading

FrameReader::Filled FrameReader::fill() {
  call_.clear();
  std::size_t straight = 0;  // bytes of this call that do not go into the buffer
  std::size_t ahead = ahead_ > buffered() ? ahead_ - buffered() : 0;
  const std::size_t body_before = body_.size();
  if (state_ == State::kPayload) {
    straight = payload_pieces(call_);
    if (straight < payload_left_) ahead = 0;
  } else if (state_ == State::kLargeBody) {
    straight = std::min<std::size_t>(header_.body_bytes - body_before, kBodyStepBytes);
    body_.resize(body_before + straight);
    if (straight > 0) call_.push_back({body_.data() + body_before, straight});
    if (body_.size() < header_.body_bytes) {
      ahead = 0;
    } else if (has_large_payload(header_)) {
      ahead = tag_.bytes() - std::min(tag_.bytes(), buffered());
    }
  } else if (state_ == State::kBody && has_large_payload(header_)) {
    ahead = header_.body_bytes + tag_.bytes() - buffered();  // and nothing of the large payload behind it
  }
  if (straight == 0 && ahead == 0) ahead = sizeof(FrameHeader);
  if (ahead > 0) call_.push_back(room(ahead));

  msghdr message{};
  message.msg_iov = call_.data();
  message.msg_iovlen = call_.size();
  ssize_t got = 0;
  do {
    got = descriptors_wanted_ ? receive_with_descriptors(fd_, message, descriptors_)
                              : recvmsg(fd_, &message, MSG_DONTWAIT);
  } while (got < 0 && errno == EINTR);
  const std::size_t bytes = got > 0 ? static_cast<std::size_t>(got) : 0;
  if (state_ == State::kLargeBody) {
    body_.resize(body_before + std::min(bytes, straight));
    tag_.update(body_.data() + body_before, body_.size() - body_before);
  } else if (state_ == State::kPayload) {
    advance_payload(std::min(bytes, straight));
  }
  if (bytes > straight) end_ += bytes - straight;
  if (got > 0 && !descriptors_wanted_ && (message.msg_flags & MSG_CTRUNC) != 0) {
    throw Error(ErrorCode::kProtocol, "the peer passes descriptors where none belong");
  }
  if (got > 0) return Filled::kBytes;
  if (got == 0) return Filled::kEnd;
  if (errno == EAGAIN || errno == EWOULDBLOCK) return Filled::kNothing;
  throw connection_error("the connection broke", errno);
}

// The rest of the payload, as far as one call takes it. Returns its bytes.
std::size_t FrameReader::payload_pieces(std::vector<iovec>& pieces) {
  const std::size_t most = std::min<std::uint64_t>(payload_left_, kCallBytes);
  std::size_t bytes = 0;
  if (dropped_) {
    bytes = std::min(most, scratch_.size());
    pieces.push_back({scratch_.data(), bytes});
    return bytes;
  }
  std::size_t filled = piece_filled_;
  for (std::size_t i = piece_; bytes < most && pieces.size() < IOV_MAX - 1; ++i, filled = 0) {
    const iovec& piece = placement_.pieces[i];
    const std::size_t length = std::min(piece.iov_len - filled, most - bytes);
    if (length > 0) pieces.push_back({static_cast<std::byte*>(piece.iov_base) + filled, length});
    bytes += length;
  }
  return bytes;
}

// So many more bytes of the payload lie in their pieces.
void FrameReader::advance_payload(std::size_t bytes) noexcept {
  payload_left_ -= bytes;
  if (dropped_) {
    tag_.update(scratch_.data(), bytes);
    return;
  }
  while (bytes > 0) {
    const iovec& piece = placement_.pieces[piece_];
    const std::size_t here = std::min(bytes, piece.iov_len - piece_filled_);
    tag_.update(static_cast<std::byte*>(piece.iov_base) + piece_filled_, here);
    piece_filled_ += here;
    bytes -= here;
    if (piece_filled_ == piece.iov_len) {
      ++piece_;
      piece_filled_ = 0;
    }
  }
}

// ---- the buffer

std::span<const std::byte> FrameReader::take(std::size_t bytes) noexcept {
  const std::span<const std::byte> taken(buffer_.get() + begin_, bytes);
  begin_ += bytes;
  return taken;
}

// Free room behind what is buffered.
iovec FrameReader::room(std::size_t bytes) noexcept {
  if (begin_ == end_) {
    begin_ = end_ = 0;
  } else if (end_ + bytes > kBufferBytes) {
    std::memmove(buffer_.get(), buffer_.get() + begin_, buffered());
    end_ -= begin_;
    begin_ = 0;
  }
  return {buffer_.get() + end_, std::min(bytes, kBufferBytes - end_)};
}

}  // namespace kvpool
