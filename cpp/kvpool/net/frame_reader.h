// Reads frames from a stream socket. Thread-safety: none; one thread at a time uses a reader.
//
// Small frames are read many at once into a buffer. A large body goes straight into its own memory, and a large payload
// straight into the pieces that the receiver names, its checksum computed as it lands: only bytes that came along with
// an earlier read are copied. After a frame with a large payload the reader takes no more than the next header and body
// ahead, so that a row of such frames is copied hardly at all.
//
// Invariant
//   X1  The sink sees a body only after the tag behind it was verified. So a man in the middle can neither forge a
//       message nor change where a payload is placed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kvpool/net/descriptor.h"
#include "kvpool/net/frame_tag.h"
#include "kvpool/net/link.h"

namespace kvpool {

// Receives the frames. FrameReader::step passes on what it throws.
class FrameSink {
 public:
  virtual ~FrameSink() = default;
  // As LinkHandler::body_bytes_max. Called before the tag of the header has come: a forged one ends the link, too.
  virtual std::size_t body_bytes_max(const FrameHeader& /*header*/) const noexcept { return kBodyBytesMax; }
  virtual void on_frame(const FrameHeader& header, Bytes&& body) = 0;  // every kind but kData
  virtual Placement on_data_frame(const FrameHeader& header, std::span<const std::byte> body) = 0;
  virtual void on_placed_frame(std::uint64_t token, bool intact) = 0;  // as LinkHandler::on_placed
};

class FrameReader {
 public:
  enum class Filled : std::uint8_t { kBytes, kNothing, kEnd };

  // `fd` is a nonblocking socket that outlives the reader. With `descriptors`, those that arrive are kept.
  FrameReader(int fd, TagKind tag, const Key& key, bool descriptors, FrameSink& sink);

  // Bytes that were read from the socket before, at most kBufferBytes. REQUIRES: nothing else was done yet.
  void put_early(std::span<const std::byte> bytes, std::vector<Descriptor> descriptors);

  // Handles buffered bytes until one frame is complete (true) or more bytes are needed (false). Throws Error kProtocol
  // and what the sink throws; then the stream can no longer be used.
  bool step();
  // One system call. REQUIRES: step() returned false. Throws Error kPeerLost when the connection broke, kProtocol when
  // descriptors come with a frame that may have none.
  Filled fill();
  // The stream has ended. Tells the sink if it ended within a payload.
  void end() noexcept;

  // From the next frame on.
  void use_checksum() noexcept { tag_.use_checksum(); }
  // Returns the descriptors received so far; from now on none may come.
  std::vector<Descriptor> take_descriptors() noexcept;

  static constexpr std::size_t kBufferBytes = std::size_t{64} << 10;
  // How many bytes to read when the next frame is unknown: enough for many small frames at once, and so little of a
  // large payload that copying it is cheap.
  static constexpr std::size_t kAheadBytes = std::size_t{16} << 10;

 private:
  enum class State : std::uint8_t { kHeader, kBody, kLargeBody, kPayload, kEnd };

  bool begin_frame();
  bool take_body();
  bool take_large_body();
  void begin_payload(Placement&& placement);
  bool take_payload();
  bool finish_payload();
  void check_first_tag();
  [[noreturn]] void throw_wrong_tag() const;
  void advance_payload(std::size_t bytes) noexcept;
  std::size_t payload_pieces(std::vector<iovec>& pieces);

  std::size_t buffered() const noexcept { return end_ - begin_; }
  std::span<const std::byte> take(std::size_t bytes) noexcept;
  iovec room(std::size_t bytes) noexcept;

  const int fd_;
  FrameSink& sink_;
  FrameTag tag_;
  bool descriptors_wanted_;
  std::vector<Descriptor> descriptors_;

  State state_ = State::kHeader;
  std::uint64_t sequence_ = 0;  // of the last frame
  FrameHeader header_{};
  Tag first_tag_{};  // of a data frame
  Bytes body_;       // of a frame that is not data, or whose body is large
  std::size_t ahead_ = kAheadBytes;

  // The payload under way.
  Placement placement_;
  bool dropped_ = false;
  std::size_t piece_ = 0;         // the first that is not full
  std::size_t piece_filled_ = 0;  // bytes of it
  std::uint64_t payload_left_ = 0;
  std::vector<iovec> call_;  // of one system call
  Bytes scratch_;            // for a payload that is dropped

  std::unique_ptr<std::byte[]> buffer_;
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
};

}  // namespace kvpool
