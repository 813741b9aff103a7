#include "kvpool/net/frame_cursor.h"

#include <limits.h>

#include <algorithm>
#include <cstring>

#include "kvpool/base/check.h"

namespace kvpool {
namespace {

// What one system call takes of a data frame: a quarter, so that the peer reads while the rest is checksummed; no less
// than a call is worth, and no more than stays in a core's cache from the checksum to the copy. Of 4 MiB, calls of 512
// KiB instead of 128 take two thirds of the time.
constexpr std::size_t kCallsPerFrame = 4;
constexpr std::size_t kCallBytesMin = std::size_t{128} << 10;
constexpr std::size_t kCallBytesMax = std::size_t{512} << 10;

constexpr std::size_t kZeroBytes = std::size_t{64} << 10;
constexpr std::byte kZeros[kZeroBytes] = {};

}  // namespace

void FrameCursor::begin(const FrameHeader& header, Bytes&& content, std::span<const iovec> pieces) noexcept {
  static_assert(kCallPieces <= IOV_MAX);
  header_ = header;
  content_ = std::move(content);
  header_.body_bytes = static_cast<std::uint32_t>(content_.size());
  pieces_ = pieces;
  if (pieces.empty() && header.payload_bytes > 0) {
    header_.body_bytes -= static_cast<std::uint32_t>(header.payload_bytes);
    own_payload_ = {content_.data() + header_.body_bytes, header.payload_bytes};
    pieces_ = {&own_payload_, 1};
  }
  next_ = offset_ = begin_ = count_ = 0;
  stage_ = Stage::kHead;
  given_up_ = false;
  sent_ = 0;
  call_bytes_ = std::clamp<std::size_t>(header.payload_bytes / kCallsPerFrame, kCallBytesMin, kCallBytesMax);
}

std::uint64_t FrameCursor::frame_bytes() const noexcept {
  const std::size_t behind = header_.payload_bytes > 0 ? sizeof(PayloadEnd) + tag_.bytes() : 0;
  return head_bytes() + header_.payload_bytes + behind;
}

std::span<iovec> FrameCursor::batch() noexcept {
  if (begin_ == count_ && stage_ != Stage::kOver) {
    begin_ = count_ = 0;
    if (given_up_) {
      gather_zeros();
    } else {
      gather();
    }
  }
  return {batch_ + begin_, count_ - begin_};
}

void FrameCursor::sent(std::size_t bytes) noexcept {
  sent_ += bytes;
  while (bytes > 0) {
    iovec& piece = batch_[begin_];
    const std::size_t here = std::min(bytes, piece.iov_len);
    piece.iov_base = static_cast<std::byte*>(piece.iov_base) + here;
    piece.iov_len -= here;
    bytes -= here;
    if (piece.iov_len == 0) ++begin_;
  }
}

void FrameCursor::add(const void* data, std::size_t bytes) noexcept {
  if (bytes > 0) batch_[count_++] = {const_cast<void*>(data), bytes};
}

void FrameCursor::gather() noexcept {
  if (stage_ == Stage::kHead) {
    tag_.begin();
    tag_.update(&header_, sizeof(header_));
    tag_.update(content_.data(), header_.body_bytes);
    add(&header_, sizeof(header_));
    add(content_.data(), header_.body_bytes);
    if (tag_.bytes() > 0) first_tag_ = tag_.finish();
    add(first_tag_.data(), tag_.bytes());
    stage_ = header_.payload_bytes > 0 ? Stage::kPayload : Stage::kOver;
  }
  if (stage_ == Stage::kOver) return;
  std::size_t bytes = 0;  // the head comes on top of what a call takes
  while (next_ < pieces_.size() && count_ < kCallPieces && bytes < call_bytes_) {
    const iovec& piece = pieces_[next_];
    const std::size_t length = std::min(piece.iov_len - offset_, call_bytes_ - bytes);
    const std::byte* const from = static_cast<const std::byte*>(piece.iov_base) + offset_;
    tag_.update(from, length);
    add(from, length);
    bytes += length;
    offset_ += length;
    if (offset_ == piece.iov_len) {
      ++next_;
      offset_ = 0;
    }
  }
  if (next_ < pieces_.size()) return;
  constexpr PayloadEnd kEnd = PayloadEnd::kWhole;
  tag_.update(&kEnd, sizeof(kEnd));
  gather_end(kEnd, tag_.bytes() > 0 ? tag_.finish() : Tag{});
}

void FrameCursor::gather_end(PayloadEnd end, const Tag& tag) noexcept {
  end_[0] = static_cast<std::byte>(end);
  std::memcpy(end_ + sizeof(PayloadEnd), tag.data(), tag_.bytes());
  add(end_, sizeof(PayloadEnd) + tag_.bytes());
  stage_ = Stage::kOver;
}

// ---- a payload that is no longer wanted

void FrameCursor::give_up() noexcept {
  KVPOOL_DCHECK(sent_ > 0);
  if (given_up_ || (stage_ == Stage::kOver && begin_ == count_)) return;
  if (sent_ >= head_bytes() + header_.payload_bytes) {
    next_ = pieces_.size();  // nothing but empty ones
    return;
  }
  given_up_ = true;
  begin_ = count_ = 0;
  stage_ = Stage::kPayload;
}

// Goes by what was sent alone: of what was gathered before, nothing is left but header, body and the first tag.
void FrameCursor::gather_zeros() noexcept {
  std::uint64_t skipped = sent_;
  const auto rest = [&](const void* data, std::size_t bytes) {
    const std::size_t gone = std::min<std::uint64_t>(skipped, bytes);
    skipped -= gone;
    add(static_cast<const std::byte*>(data) + gone, bytes - gone);
  };
  rest(&header_, sizeof(header_));
  rest(content_.data(), header_.body_bytes);
  rest(first_tag_.data(), tag_.bytes());
  std::uint64_t left = header_.payload_bytes - skipped;
  for (std::size_t bytes = 0; left > 0 && bytes < call_bytes_;) {
    const std::size_t length = std::min<std::uint64_t>(left, kZeroBytes);
    add(kZeros, length);
    bytes += length;
    left -= length;
  }
  if (left == 0) gather_end(PayloadEnd::kGivenUp, tag_.given_up(first_tag_));
}

// ---- a payload that must not be waited for

std::size_t FrameCursor::copy_rest() {
  Bytes rest;
  rest.reserve(frame_bytes() - sent_);
  for (auto left = batch(); !left.empty(); left = batch()) {
    for (const iovec& piece : left) {
      const auto* const bytes = static_cast<const std::byte*>(piece.iov_base);
      rest.insert(rest.end(), bytes, bytes + piece.iov_len);
    }
    begin_ = count_;
  }
  content_ = std::move(rest);
  batch_[0] = {content_.data(), content_.size()};
  begin_ = 0;
  count_ = content_.empty() ? 0 : 1;
  return content_.size();
}

}  // namespace kvpool
