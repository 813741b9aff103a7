// The bytes of one frame, in the order in which they are sent. Knows no sockets. Thread-safety: none; one thread at a
// time uses a cursor.
//
// A payload is hashed batch by batch, just before it is sent, while it is in the caches. A frame that was begun must be
// finished, because nothing can follow half a frame. Its payload can be given up: see give_up().
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "kvpool/net/frame_tag.h"
#include "kvpool/net/wire.h"

namespace kvpool {

class FrameCursor {
 public:
  explicit FrameCursor(FrameTag& tag) noexcept : tag_(tag) {}
  FrameCursor(const FrameCursor&) = delete;
  FrameCursor& operator=(const FrameCursor&) = delete;

  // Begins a frame; one that was begun before is forgotten. `content`: the body, and behind it the payload unless
  // `pieces` are that. They are read until the frame is out, given up, or copied. Of the header all but body_bytes
  // counts.
  void begin(const FrameHeader& header, Bytes&& content, std::span<const iovec> pieces = {}) noexcept;

  // What to send next; empty at the end of the frame. Valid until the next call.
  std::span<iovec> batch() noexcept;
  // So many bytes of the batch were sent.
  void sent(std::size_t bytes) noexcept;
  std::uint64_t bytes_sent() const noexcept { return sent_; }

  // Stops reading the pieces: sends zeros for the rest of the payload and tells the receiver to drop it. If all of the
  // payload was sent, the frame stays whole. Needs no memory. REQUIRES: some byte was sent.
  void give_up() noexcept;
  // Lets go of the frame's memory.
  void forget() noexcept { content_ = {}; }
  // Copies the rest of the frame and stops reading the pieces. Returns the number of bytes copied. Throws
  // std::bad_alloc, and then nothing has changed.
  std::size_t copy_rest();

 private:
  enum class Stage : std::uint8_t { kHead, kPayload, kOver };

  std::uint64_t head_bytes() const noexcept { return sizeof(header_) + header_.body_bytes + tag_.bytes(); }
  std::uint64_t frame_bytes() const noexcept;
  void gather() noexcept;
  void gather_zeros() noexcept;
  void gather_end(PayloadEnd end, const Tag& tag) noexcept;
  void add(const void* data, std::size_t bytes) noexcept;

  static constexpr std::size_t kCallPieces = 512;

  FrameTag& tag_;
  FrameHeader header_{};
  Bytes content_;
  Tag first_tag_{};
  std::byte end_[sizeof(PayloadEnd) + kTagBytes];
  iovec own_payload_{};            // within content_
  std::span<const iovec> pieces_;  // of the payload
  std::size_t next_ = 0;           // the first of them that is not wholly in a batch yet
  std::size_t offset_ = 0;         // bytes of it that are
  Stage stage_ = Stage::kOver;     // what the next batch begins with
  bool given_up_ = false;
  std::uint64_t sent_ = 0;  // bytes of the frame
  std::size_t call_bytes_ = 0;

  iovec batch_[kCallPieces + 4];  // header, body and tag come before the pieces, the end behind them
  std::size_t begin_ = 0;         // of what is left of the batch
  std::size_t count_ = 0;
};

}  // namespace kvpool
