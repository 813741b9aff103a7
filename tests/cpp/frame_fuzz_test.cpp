// Streams of frames, correct ones cut into any pieces and wrong ones of many kinds, against a model that knows what of
// them may arrive.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>

#include "fuzz_seeds.h"
#include "raw_peer.h"
#include "sock_fixture.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

struct Sent {
  FrameKind kind;
  std::uint64_t id;
  Bytes body;
  Bytes payload;
  PayloadEnd end = PayloadEnd::kWhole;
};

// Records what the reader hands over, and gives places of random shape, or none.
class Sink final : public FrameSink {
 public:
  explicit Sink(Dice& dice) : dice_(dice) {}

  void on_frame(const FrameHeader& header, Bytes&& body) override {
    got.push_back({static_cast<FrameKind>(header.kind), header.id, std::move(body), {}});
  }
  Placement on_data_frame(const FrameHeader& header, std::span<const std::byte> body) override {
    REQUIRE_FALSE(placing_);
    got.push_back({FrameKind::kData, header.id, Bytes(body.begin(), body.end()), {}});
    Placement placement;
    placement.token = ++token_;
    if (!never_drops && dice_.one_in(4)) {
      dropped.push_back(got.size() - 1);
      return placement;
    }
    placing_ = true;
    target_.assign(header.payload_bytes, std::byte{0});
    for (std::size_t at = 0; at < target_.size();) {
      const std::size_t length =
          dice_.one_in(5) ? 0 : std::min<std::size_t>(target_.size() - at, dice_.below(9000) + 1);
      placement.pieces.push_back({target_.data() + at, length});
      at += length;
    }
    return placement;
  }
  void on_placed_frame(std::uint64_t token, bool intact) override {
    REQUIRE(placing_);
    placing_ = false;
    CHECK(token == token_);
    got.back().payload = target_;
    if (!intact) given_up_or_damaged.push_back(got.size() - 1);
  }

  std::vector<Sent> got;
  std::vector<std::size_t> dropped;
  std::vector<std::size_t> given_up_or_damaged;
  bool never_drops = false;
  bool placing() const { return placing_; }

 private:
  Dice& dice_;
  bool placing_ = false;
  std::uint64_t token_ = 0;
  Bytes target_;
};

std::size_t random_size(Dice& dice, std::size_t most) {
  const std::array<std::size_t, 7> edges = {0, 1, 16, 4096, 16384, FrameReader::kBufferBytes, std::size_t{1} << 20};
  if (dice.one_in(3)) {
    const std::size_t edge = dice.pick(edges);
    return std::min(most, edge + dice.below(5) - std::min<std::size_t>(edge, 2));
  }
  return dice.below(dice.one_in(10) ? most : 600);
}

std::vector<Sent> random_conversation(Dice& dice) {
  std::vector<Sent> sent;
  for (std::uint32_t i = dice.below(12) + 1; i > 0; --i) {
    if (dice.one_in(2)) {
      sent.push_back({FrameKind::kData, dice.any(), some_bytes(random_size(dice, 100'000), i),
                      some_bytes(std::max<std::size_t>(1, random_size(dice, 2'000'000)), i + 7),
                      dice.one_in(5) ? PayloadEnd::kGivenUp : PayloadEnd::kWhole});
    } else {
      sent.push_back({dice.one_in(2) ? FrameKind::kCall : FrameKind::kAnswer,
                      dice.any(),
                      some_bytes(random_size(dice, 300'000), i),
                      {}});
    }
  }
  return sent;
}

Bytes bytes_of(const std::vector<Sent>& sent, Wire wire) {
  FrameForge forge(wire, false);
  for (const Sent& frame : sent) forge.add(frame.kind, frame.id, frame.body, frame.payload, frame.end);
  return forge.take();
}

bool contains(const std::vector<std::size_t>& list, std::size_t i) {
  return std::find(list.begin(), list.end(), i) != list.end();
}

void check_same(const Sent& got, const Sent& sent, bool with_payload) {
  CHECK(got.kind == sent.kind);
  CHECK(got.id == sent.id);
  CHECK(got.body == sent.body);
  if (with_payload) CHECK(got.payload == sent.payload);
}

// Feeds the bytes in random pieces through a socket. Returns the error that ended the reading, if there was one.
std::optional<Error> feed(FrameReader& reader, const Descriptor& to, const Bytes& bytes, Dice& dice) {
  std::size_t fed = 0;
  try {
    while (true) {
      while (reader.step()) {
      }
      if (fed < bytes.size()) {
        const std::size_t piece =
            std::min<std::size_t>(bytes.size() - fed, dice.one_in(3) ? dice.below(40) + 1 : dice.below(200'000) + 1);
        const ssize_t sent = send(to.get(), bytes.data() + fed, piece, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent > 0) fed += static_cast<std::size_t>(sent);
      }
      if (reader.fill() == FrameReader::Filled::kNothing && fed == bytes.size()) return std::nullopt;
    }
  } catch (const Error& error) {
    return error;
  }
}

}  // namespace

TEST_CASE("frames: what is sent arrives, however it is cut and wherever it is placed") {
  for (const std::uint64_t seed : FuzzTime()) {
    announce_fuzz("frame", seed);
    Dice dice(seed);
    for (int round = 0; round < fuzz_length(40); ++round) {
      const Wire wire = std::array{Wire::kUnix, Wire::kTcpChecksum, Wire::kTcpMac}[dice.below(3)];
      const auto [mine, theirs] = socket_pair(Wire::kUnix);
      Sink sink(dice);
      FrameReader reader(mine.get(), tag_of(wire), keys_of(true).receive, false, sink);
      const auto sent = random_conversation(dice);
      const auto error = feed(reader, theirs, bytes_of(sent, wire), dice);
      REQUIRE_FALSE(error);
      reader.end();
      REQUIRE(sink.got.size() == sent.size());
      for (std::size_t i = 0; i < sent.size(); ++i) {
        const bool dropped = contains(sink.dropped, i);
        check_same(sink.got[i], sent[i], !dropped);
        CHECK(contains(sink.given_up_or_damaged, i) == (!dropped && sent[i].end == PayloadEnd::kGivenUp));
      }
    }
  }
}

TEST_CASE("frames: changed, lost, repeated or reordered bytes end the stream, and no wrong byte comes out") {
  for (const std::uint64_t seed : FuzzTime()) {
    announce_fuzz("frame", seed);
    Dice dice(seed);
    int found = 0;
    for (int round = 0; round < fuzz_length(80); ++round) {
      const Wire wire = dice.one_in(2) ? Wire::kTcpChecksum : Wire::kTcpMac;
      const auto [mine, theirs] = socket_pair(Wire::kUnix);
      Sink sink(dice);
      FrameReader reader(mine.get(), tag_of(wire), keys_of(true).receive, false, sink);
      const auto sent = random_conversation(dice);
      Bytes bytes = bytes_of(sent, wire);
      const Bytes whole = bytes;
      const std::size_t at = dice.below(bytes.size());
      const auto place = bytes.begin() + static_cast<std::ptrdiff_t>(at);
      const std::size_t count = std::min<std::size_t>(dice.below(100) + 1, bytes.size() - at);
      switch (dice.below(4)) {
        case 0:
          *place ^= static_cast<std::byte>(1U << dice.below(8));
          break;
        case 1:
          bytes.erase(place, place + static_cast<std::ptrdiff_t>(count));
          break;
        case 2: {
          const Bytes doubled(place, place + static_cast<std::ptrdiff_t>(count));
          bytes.insert(place, doubled.begin(), doubled.end());
          break;
        }
        default:
          std::rotate(place, place + static_cast<std::ptrdiff_t>(count / 2),
                      place + static_cast<std::ptrdiff_t>(count));
      }
      if (bytes == whole) continue;
      const auto error = feed(reader, theirs, bytes, dice);
      reader.end();
      CHECK_FALSE(sink.placing());
      if (error) {
        CHECK(error->code() == ErrorCode::kProtocol);
        ++found;
      }
      // What came out until then is what was sent. The payload of the last frame may be one whose end never came or was
      // wrong; its head is right even then.
      REQUIRE(sink.got.size() <= sent.size());
      for (std::size_t i = 0; i < sink.got.size(); ++i) {
        const bool last = i + 1 == sink.got.size();
        const bool placed = !contains(sink.dropped, i) && !last;
        check_same(sink.got[i], sent[i], placed && sent[i].end == PayloadEnd::kWhole);
        if (!last)
          CHECK(contains(sink.given_up_or_damaged, i) ==
                (!contains(sink.dropped, i) && sent[i].end == PayloadEnd::kGivenUp));
      }
      if (!error) CHECK(sink.got.size() <= sent.size());
    }
    CHECK(found > 0);
  }
}

TEST_CASE("frames: a bit that flips anywhere is found, every time") {
  const std::uint64_t seed = fuzz_seeds().back();
  announce_fuzz("bit flips", seed);
  Dice dice(seed);
  const int flips = std::getenv("KVPOOL_LONG") != nullptr ? 1'000'000 : 3'000;
  int ended = 0;
  for (int flip = 0; flip < flips; ++flip) {
    const Wire wire = dice.one_in(2) ? Wire::kTcpChecksum : Wire::kTcpMac;
    const auto [mine, theirs] = socket_pair(Wire::kUnix);
    Sink sink(dice);
    FrameReader reader(mine.get(), tag_of(wire), keys_of(true).receive, false, sink);
    const std::vector<Sent> sent = {
        {FrameKind::kCall, dice.any(), some_bytes(dice.below(60), 1), {}},
        {FrameKind::kData, dice.any(), some_bytes(dice.below(60), 2), some_bytes(1 + dice.below(200), 3)},
        {FrameKind::kAnswer, dice.any(), some_bytes(dice.below(60), 4), {}}};
    Bytes bytes = bytes_of(sent, wire);
    const std::size_t at = dice.below(bytes.size());
    bytes[at] ^= static_cast<std::byte>(1U << dice.below(8));
    std::size_t hit = 0;
    while (at >= bytes_of({sent.begin(), sent.begin() + static_cast<std::ptrdiff_t>(hit) + 1}, wire).size()) ++hit;
    const auto error = feed(reader, theirs, bytes, dice);
    reader.end();
    if (error) {
      CHECK(error->code() == ErrorCode::kProtocol);
      ++ended;
    }  // else it waits for more: a length was changed
    const std::size_t before = bytes_of({sent.begin(), sent.begin() + 1}, wire).size();
    const std::size_t head = sizeof(FrameHeader) + sent[1].body.size() + kTagBytes;
    const bool head_right = hit == 1 && at >= before + head;  // only then the sink may be called
    REQUIRE(sink.got.size() <= hit + (head_right ? 1 : 0));
    for (std::size_t i = 0; i < sink.got.size(); ++i) check_same(sink.got[i], sent[i], false);
    const bool placed = head_right && sink.dropped.empty();
    REQUIRE(sink.given_up_or_damaged.size() == (placed ? 1 : 0));
  }
  CHECK(ended > flips / 2);
}

// A man in the middle may change and hold back any bytes. But he cannot have a
// byte placed where the sender has not said.
TEST_CASE("frames: no payload is placed before the header of its frame is verified") {
  for (const Wire wire : {Wire::kTcpChecksum, Wire::kTcpMac}) {
    const Bytes body = some_bytes(60, 2);
    const Bytes payload = some_bytes(5000, 3);
    const Bytes whole = bytes_of({{FrameKind::kData, 7, body, payload}}, wire);
    const std::size_t head = sizeof(FrameHeader) + body.size() + kTagBytes;
    for (std::size_t at = 0; at < head + 40; ++at) {
      Bytes bytes = whole;
      bytes[at] ^= std::byte{0x10};
      bytes.resize(head + payload.size());  // the last tag never comes
      const auto [mine, theirs] = socket_pair(Wire::kUnix);
      Dice dice(at + 1);
      Sink sink(dice);
      sink.never_drops = true;
      FrameReader reader(mine.get(), tag_of(wire), keys_of(true).receive, false, sink);
      static_cast<void>(feed(reader, theirs, bytes, dice));
      CHECK(sink.got.size() == (at < head ? 0 : 1));
      CHECK(sink.placing() == (at >= head));
      reader.end();
      CHECK(sink.given_up_or_damaged.size() == (at < head ? 0 : 1));
    }
  }
}

TEST_CASE("frames: only the sender can give up a payload, and nobody can undo it") {
  for (const Wire wire : {Wire::kTcpChecksum, Wire::kTcpMac}) {
    for (const PayloadEnd end : {PayloadEnd::kWhole, PayloadEnd::kGivenUp, static_cast<PayloadEnd>(2)}) {
      for (const bool changed : {false, true}) {
        Bytes bytes = bytes_of({{FrameKind::kData, 7, some_bytes(60), some_bytes(5000), end}}, wire);
        if (changed) bytes[bytes.size() - kTagBytes - 1] ^= std::byte{1};
        const auto [mine, theirs] = socket_pair(Wire::kUnix);
        Dice dice(5);
        Sink sink(dice);
        sink.never_drops = true;
        FrameReader reader(mine.get(), tag_of(wire), keys_of(true).receive, false, sink);
        const auto error = feed(reader, theirs, bytes, dice);
        CHECK(error.has_value() == (changed || end == static_cast<PayloadEnd>(2)));
        CHECK(sink.given_up_or_damaged.size() == (changed || end != PayloadEnd::kWhole ? 1 : 0));
      }
    }
  }
}

TEST_CASE("frames: garbage ends the stream with a protocol error, or waits for more") {
  for (const std::uint64_t seed : FuzzTime()) {
    announce_fuzz("frame", seed);
    Dice dice(seed);
    for (int round = 0; round < fuzz_length(400); ++round) {
      const auto [mine, theirs] = socket_pair(Wire::kUnix);
      Sink sink(dice);
      FrameReader reader(mine.get(), TagKind::kNone, keys_of(true).receive, false, sink);
      // Headers that are nearly right get further than noise.
      Bytes bytes;
      for (std::uint64_t sequence = 1; sequence < 6; ++sequence) {
        FrameHeader header{};
        header.kind = static_cast<std::uint8_t>(dice.one_in(4) ? dice.any() : 16 + dice.below(7));
        header.sequence = dice.one_in(20) ? dice.any() : sequence;
        header.body_bytes = dice.one_in(6) ? static_cast<std::uint32_t>(dice.any()) : dice.below(300);
        header.payload_bytes = dice.one_in(3) ? static_cast<std::uint32_t>(dice.any()) >> dice.below(32) : 0;
        header.verb = dice.one_in(3) ? static_cast<std::uint16_t>(dice.below(9)) : 0;
        header.lifetime_ms = dice.one_in(3) ? static_cast<std::uint32_t>(dice.any()) : 0;
        const auto* raw = reinterpret_cast<const std::byte*>(&header);
        bytes.insert(bytes.end(), raw, raw + sizeof(header));
        const Bytes noise = some_bytes(dice.below(2000), static_cast<unsigned>(sequence));
        bytes.insert(bytes.end(), noise.begin(), noise.end());
      }
      if (const auto error = feed(reader, theirs, bytes, dice)) CHECK(error->code() == ErrorCode::kProtocol);
      reader.end();
      CHECK_FALSE(sink.placing());
    }
  }
}
