// Data frames that are given up when they are partly sent: their sender returns at once, and the link goes on.
#include <doctest/doctest.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>

#include "fuzz_seeds.h"
#include "kvpool/base/clock.h"
#include "kvpool/net/frame_cursor.h"
#include "kvpool/net/frame_writer.h"
#include "raw_peer.h"
#include "sock_fixture.h"
#include "thrown.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

const Wire kWires[] = {Wire::kUnix, Wire::kTcpChecksum, Wire::kTcpMac};

// Memory that cannot be read any more once it was taken away: a read ends the process.
class Source {
 public:
  explicit Source(std::size_t bytes) : bytes_(bytes) {
    memory_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(memory_ != MAP_FAILED);
    const Bytes content = some_bytes(bytes, 11);
    std::memcpy(memory_, content.data(), bytes);
  }
  ~Source() { munmap(memory_, bytes_); }
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;
  void take_away() { REQUIRE(mprotect(memory_, bytes_, PROT_NONE) == 0); }
  iovec piece() const { return {memory_, bytes_}; }

 private:
  std::size_t bytes_;
  void* memory_ = nullptr;
};

// The result of reading a stream: the payload of the first frame, how it ended, and the messages behind it.
struct Heard final : FrameSink {
  void on_frame(const FrameHeader& header, Bytes&&) override { ids.push_back(header.id); }
  Placement on_data_frame(const FrameHeader& header, std::span<const std::byte> body) override {
    CHECK(Bytes(body.begin(), body.end()) == some_bytes(40));
    payload.resize(header.payload_bytes);
    return {{{payload.data(), payload.size()}}, 1};
  }
  void on_placed_frame(std::uint64_t, bool intact) override { ends.push_back(intact); }

  Bytes payload;
  std::vector<bool> ends;
  std::vector<std::uint64_t> ids;
};

// Appends the next bytes of a cursor to the stream, up to a number.
void pull(FrameCursor& cursor, Bytes& stream, std::size_t most) {
  for (auto batch = cursor.batch(); !batch.empty() && most > 0; batch = cursor.batch()) {
    const std::size_t length = std::min(batch[0].iov_len, most);
    const auto* const bytes = static_cast<const std::byte*>(batch[0].iov_base);
    stream.insert(stream.end(), bytes, bytes + length);
    cursor.sent(length);
    most -= length;
  }
}

void read_all(const Bytes& stream, Wire wire, Heard& heard) {
  const auto [mine, theirs] = socket_pair(Wire::kUnix);
  FrameReader reader(mine.get(), tag_of(wire), keys_of(true).receive, false, heard);
  std::size_t fed = 0;
  while (true) {
    while (reader.step()) {
    }
    if (fed < stream.size()) {
      const ssize_t sent = send(theirs.get(), stream.data() + fed, stream.size() - fed, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (sent > 0) fed += static_cast<std::size_t>(sent);
    }
    if (reader.fill() == FrameReader::Filled::kNothing && fed == stream.size()) break;
  }
  reader.end();
}

FrameHeader header_of(FrameKind kind, std::uint64_t sequence, std::uint64_t payload_bytes) {
  FrameHeader header{};
  header.kind = static_cast<std::uint8_t>(kind);
  header.id = sequence * 10;
  header.sequence = sequence;
  header.payload_bytes = payload_bytes;
  return header;
}

enum class Fate : std::uint8_t { kGivenUp, kCopied };

// A frame of which `cut` bytes went out before its fate, and a message behind it.
Heard frame_cut_at(std::size_t cut, Wire wire, Fate fate, std::size_t payload_bytes) {
  FrameTag tag(tag_of(wire), keys_of(true).receive);
  FrameCursor cursor(tag);
  Bytes stream;
  {
    Source source(payload_bytes);
    iovec piece = source.piece();
    const std::size_t half = piece.iov_len / 2;
    std::vector<iovec> pieces = {{piece.iov_base, half},
                                 {nullptr, 0},
                                 {static_cast<std::byte*>(piece.iov_base) + half, piece.iov_len - half},
                                 {nullptr, 0}};
    cursor.begin(header_of(FrameKind::kData, 1, payload_bytes), some_bytes(40), pieces);
    pull(cursor, stream, cut);
    if (fate == Fate::kGivenUp) {
      cursor.give_up();
    } else {
      cursor.copy_rest();
    }
    source.take_away();
    pieces.assign(4, iovec{nullptr, SIZE_MAX});
    pull(cursor, stream, SIZE_MAX);
  }
  cursor.begin(header_of(FrameKind::kAnswer, 2, 0), some_bytes(9));
  pull(cursor, stream, SIZE_MAX);
  Heard heard;
  read_all(stream, wire, heard);
  return heard;
}

}  // namespace

TEST_CASE("a frame can be given up at every byte: its sources are read no more, and later frames are understood") {
  for (const Wire wire : kWires) {
    CAPTURE(name_of(wire));
    constexpr std::size_t kPayload = 301;
    const std::size_t head = sizeof(FrameHeader) + 40 + (wire == Wire::kUnix ? 0 : kTagBytes);
    const std::size_t whole = head + kPayload + 1 + (wire == Wire::kUnix ? 0 : kTagBytes);
    for (std::size_t cut = 1; cut <= whole; ++cut) {
      CAPTURE(cut);
      const Heard heard = frame_cut_at(cut, wire, Fate::kGivenUp, kPayload);
      const bool intact = cut >= head + kPayload;
      CHECK(heard.ends == std::vector<bool>{intact});
      CHECK(heard.ids == std::vector<std::uint64_t>{20});
      if (intact) CHECK(heard.payload == some_bytes(kPayload, 11));
    }
  }
}

TEST_CASE("a frame that is given up may have the largest length") {
  for (const Wire wire : kWires) {
    for (const std::size_t cut : {std::size_t{1}, std::size_t{200'000}, (std::size_t{4} << 20) - 1}) {
      const Heard heard = frame_cut_at(cut, wire, Fate::kGivenUp, std::size_t{4} << 20);
      CHECK(heard.ends == std::vector<bool>{false});
      CHECK(heard.ids == std::vector<std::uint64_t>{20});
    }
  }
}

TEST_CASE("the rest of a frame can be copied aside at every byte, and it arrives whole") {
  for (const Wire wire : kWires) {
    CAPTURE(name_of(wire));
    for (std::size_t cut = 0; cut <= 350; cut += 7) {
      CAPTURE(cut);
      const Heard heard = frame_cut_at(cut, wire, Fate::kCopied, 301);
      CHECK(heard.ends == std::vector<bool>{true});
      CHECK(heard.ids == std::vector<std::uint64_t>{20});
      CHECK(heard.payload == some_bytes(301, 11));
    }
    CHECK(frame_cut_at(1000, wire, Fate::kCopied, std::size_t{1} << 20).payload ==
          some_bytes(std::size_t{1} << 20, 11));
  }
}

// It used to close the link, and with it everybody else's transfers, as soon as a network was slow.
TEST_CASE("a link: giving up data that was begun affects only its sender") {
  for (const Wire wire : kWires) {
    for (const bool cancel : {false, true}) {
      CAPTURE(name_of(wire));
      CAPTURE(cancel);
      Source source(kPayloadBytesMax);  // more than any socket holds
      const Bytes next = some_bytes(100'000, 5);
      Bytes sink(kPayloadBytesMax);
      std::atomic<bool> read_on{false};
      LinkPair pair(wire);
      pair.right.handler->answer = [&](const Message&) {
        while (!read_on) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      };
      pair.right.handler->place = [&](std::uint64_t token, std::uint64_t bytes) {
        return Placement{{{sink.data(), bytes}}, token};
      };
      pair.left.link->send(message_of(FrameKind::kCall, 1));  // the peer reads nothing from now on
      std::atomic<bool> cancelled{false};
      std::thread canceller;
      if (cancel) {
        canceller = std::thread([&] {
          std::this_thread::sleep_for(std::chrono::milliseconds(50));
          cancelled = true;
        });
      }
      const std::int64_t begun = monotonic_ns();
      const iovec piece = source.piece();
      const auto code = code_of([&] {
        pair.left.link->send_data(1, some_bytes(40), {&piece, 1}, cancel ? in_seconds(60) : in_seconds(0.05),
                                  &cancelled);
      });
      CHECK(monotonic_ns() - begun < 20 * kSecond);
      if (cancel) canceller.join();
      CHECK(code == (cancel ? ErrorCode::kCancelled : ErrorCode::kDeadline));
      source.take_away();
      // Somebody else waits behind it, and a message.
      std::thread other([&] {
        const iovec its{const_cast<std::byte*>(next.data()), next.size()};
        CHECK_NOTHROW(pair.left.link->send_data(2, {}, {&its, 1}, in_seconds(60), nullptr));
      });
      pair.left.link->send(message_of(FrameKind::kAnswer, 3));
      read_on = true;
      other.join();
      CHECK(soon([&] { return pair.right.handler->placed_count() == 2 && pair.right.handler->message_count() == 2; }));
      const std::vector<std::pair<std::uint64_t, bool>> expected = {{1, false}, {2, true}};
      CHECK(pair.right.handler->placed == expected);
      CHECK(std::equal(next.begin(), next.end(), sink.begin()));
      CHECK(pair.left.handler->closed_count() == 0);
      CHECK(pair.right.handler->closed_count() == 0);
    }
  }
}

TEST_CASE("a frame grows to the length that the link sends in a few milliseconds") {
  constexpr double kMb = 1e6;
  constexpr std::uint64_t kKiB = 1024;
  struct Rate {
    double bytes_per_s;
    std::uint64_t least;
    std::uint64_t most;
  };
  for (const auto& [rate, least, most] :
       {Rate{1 * kMb, FramePace::kBytesMin, 8 * kKiB}, Rate{10 * kMb, 40'000, 60'000}, Rate{60 * kMb, 150'000, 500'000},
        Rate{1000 * kMb, FramePace::kBytesMax, FramePace::kBytesMax}}) {
    CAPTURE(rate);
    FramePace pace;
    CHECK(pace.payload_bytes() == FramePace::kBytesAtFirst);
    // The kernel takes a few MiB at once, then makes the sender wait for a third of that: so frames are bimodal.
    double held = 0;
    for (int frame = 0; frame < 2000; ++frame) {
      const std::uint64_t bytes = pace.payload_bytes();
      double busy_s = static_cast<double>(bytes) / 10e9;
      held += static_cast<double>(bytes);
      if (held > 2'500'000) {
        busy_s += 800'000 / rate;
        held -= 800'000;
      }
      pace.measured(bytes, static_cast<std::int64_t>(busy_s * 1e9));
    }
    CHECK(pace.payload_bytes() >= least);
    CHECK(pace.payload_bytes() <= most);
    // A link that stalled does not stay slow.
    for (int frame = 0; frame < 2; ++frame) pace.measured(0, kSecond);  // the first ends the earlier frame
    CHECK(pace.payload_bytes() == FramePace::kBytesMin);
    for (int frame = 0; frame < 2000; ++frame) pace.measured(pace.payload_bytes(), 8'000);
    CHECK(pace.payload_bytes() == FramePace::kBytesMax);
  }
}
