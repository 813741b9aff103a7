#include "kvpool/routes/sock/sock_route.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>

#include "kvpool/base/clock.h"
#include "kvpool/net/data_body.h"
#include "route_trial.h"

namespace kvpool {
namespace {

using testing::code_of;
using testing::Dice;
using testing::Trial;

// A link; its other end places content as a session does.
class PlacingLink final : public Link {
 public:
  explicit PlacingLink(const MediaSpans& target) : target_(target) {}

  void send(Message&&) override {}
  void send_data(std::uint64_t id, std::span<const std::byte> body, std::span<const iovec> pieces, std::int64_t,
                 const std::atomic<bool>*) override {
    if (frames_left_-- == 0) throw Error(ErrorCode::kPeerLost, "the link is closed");
    CHECK(id == 7);
    Bytes payload;
    for (const iovec& piece : pieces) {
      const auto* first = static_cast<const std::byte*>(piece.iov_base);
      payload.insert(payload.end(), first, first + piece.iov_len);
    }
    CHECK(payload.size() <= kDataBytesMax);
    longest_ = std::max(longest_, payload.size());
    CHECK(body.size() <= kBodyBytesMax);
    const DataBody data = read_data_body(body, payload.size(), target_);
    CHECK(data.blocks.size() * data.ranges.size() <= kDataPiecesMax);
    std::size_t at = 0;
    for (const iovec& piece : data_placement(data, target_)) {
      REQUIRE(at + piece.iov_len <= payload.size());
      std::memcpy(piece.iov_base, payload.data() + at, piece.iov_len);
      at += piece.iov_len;
    }
    CHECK(at == payload.size());
    ++frames_;
    pieces_ += pieces.size();
  }
  bool drive(std::int64_t, const std::function<bool()>&) override { return false; }
  void wake() noexcept override {}
  int descriptor(std::size_t) const noexcept override { return -1; }
  int pidfd() const noexcept override { return -1; }
  std::string describe() const override { return "test"; }
  void close(const Error&) noexcept override { closed_ = true; }

  std::uint64_t payload_bytes_wanted() const noexcept override { return wanted_ ? wanted_() : kPayloadBytesMax; }

  void want(std::function<std::uint64_t()> wanted) { wanted_ = std::move(wanted); }
  std::size_t longest() const { return longest_; }
  void fail_after(int frames) { frames_left_ = frames; }
  bool closed() const { return closed_; }
  std::uint64_t frames() const { return frames_; }
  std::uint64_t pieces() const { return pieces_; }

 private:
  const MediaSpans& target_;
  std::function<std::uint64_t()> wanted_;
  std::size_t longest_ = 0;
  int frames_left_ = -1;
  bool closed_ = false;
  std::uint64_t frames_ = 0;
  std::uint64_t pieces_ = 0;
};

TEST_CASE("frames place at the receiver the bytes that a naive copy writes, whatever the layouts of both") {
  for (const std::uint64_t seed : testing::fuzz_seeds()) {
    testing::announce_fuzz("sock", seed);
    Dice dice(seed);
    for (int round = 0; round < testing::fuzz_length(30); ++round) {
      CAPTURE(seed);
      CAPTURE(round);
      const Trial trial = round % 10 == 0 ? Trial::large(dice) : Trial::small(dice);
      const auto link = std::make_shared<PlacingLink>(trial.target.spans());
      const auto route = make_sock_route(trial.source.spans(), nullptr, link);
      const WriteOutcome outcome = testing::write_whole(*route, trial);
      CHECK(outcome.pieces >= link->pieces());  // gathered ones are fewer on the way
      CHECK(outcome.calls <= trial.strips.size() * trial.from.size());
      if (!trial.gather) CHECK(outcome.calls == trial.strips.size() * trial.from.size());
      CHECK(trial.target == trial.expected);
    }
  }
}

TEST_CASE("frames are no longer than the link allows, and nothing is lost when the limit changes") {
  for (const std::uint64_t seed : testing::fuzz_seeds()) {
    testing::announce_fuzz("sock", seed);
    Dice dice(seed);
    for (int round = 0; round < testing::fuzz_length(30); ++round) {
      CAPTURE(seed);
      CAPTURE(round);
      const Trial trial = Trial::small(dice);
      const auto link = std::make_shared<PlacingLink>(trial.target.spans());
      std::uint64_t most = 0;
      const bool steady = dice.one_in(2);
      std::uint64_t wanted = 1 + dice.below(300);
      link->want([&] {
        if (!steady && dice.one_in(3)) wanted = 1 + dice.below(dice.one_in(2) ? 20 : 3000);
        most = std::max(most, wanted);
        return wanted;
      });
      const auto route = make_sock_route(trial.source.spans(), nullptr, link);
      testing::write_whole(*route, trial);
      CHECK(trial.target == trial.expected);
      CHECK(link->longest() <= most);
    }
  }
}

TEST_CASE("blocks longer than a frame are cut, and shorter ones share a frame") {
  Dice dice(3);
  const auto frames_of = [&](std::uint32_t blocks, std::size_t bytes) {
    testing::BlockMemory source(dice, testing::plain_shape(blocks, {bytes}), {});
    testing::BlockMemory target(dice, testing::plain_shape(blocks, {bytes / 2, bytes - bytes / 2}), {});
    const BlockStrip whole{0, 0, bytes};
    std::vector<Address> all;
    for (std::uint32_t i = 0; i < blocks; ++i) all.push_back(make_address(0, Medium::kHbm, 0, i));
    const auto link = std::make_shared<PlacingLink>(target.spans());
    const auto route = make_sock_route(source.spans(), nullptr, link);
    WriteRequest request;
    request.transfer = 7;
    request.strips = {&whole, 1};
    request.from = all;
    request.to = all;
    request.deadline_ns = monotonic_ns() + 30 * testing::kSecondNs;
    CHECK(route->write(request).bytes == blocks * bytes);
    for (std::uint32_t i = 0; i < blocks; ++i) {
      for (std::size_t k = 0; k < bytes; k += 97) {
        REQUIRE(testing::content_byte(target.spans()[Medium::kHbm], i, k) ==
                testing::content_byte(source.spans()[Medium::kHbm], i, k));
      }
    }
    return link->frames();
  };
  CHECK(frames_of(1, (std::size_t{9} << 20) + 5) == 3);
  CHECK(frames_of(2, std::size_t{5} << 20) == 4);
  CHECK(frames_of(64, 4096) == 1);
  CHECK(frames_of(2049, 4096) == 3);
  CHECK(frames_of(5000, 16) == 2);
}

TEST_CASE("pieces share a frame of sock, and if they must not, each is a frame") {
  constexpr std::uint32_t kBlocks = 40;
  constexpr std::size_t kPiece = 4096;
  Dice dice(8);
  const auto shape = testing::plain_shape(kBlocks, {kPiece, kPiece, kPiece, kPiece});
  testing::BlockMemory source(dice, shape, {});
  const std::vector<BlockStrip> layer{{2 * kPiece, 2 * kPiece, 2 * kPiece}};
  const std::vector<BlockStrip> pieces{{2 * kPiece, 2 * kPiece, kPiece}, {3 * kPiece, 3 * kPiece, kPiece}};
  std::vector<Address> from;
  std::vector<Address> to;
  for (std::uint32_t i = 0; i < 32; ++i) {
    from.push_back(make_address(0, Medium::kHbm, 0, i * 7 % kBlocks));
    to.push_back(make_address(0, Medium::kHbm, 0, (i * 11 + 3) % kBlocks));
  }
  for (const std::uint64_t wanted : {kPayloadBytesMax, std::uint64_t{3000}}) {
    for (const bool gather : {true, false}) {
      testing::BlockMemory target(dice, shape, {});
      testing::BlockMemory expected(target);
      testing::naive_write(source.spans(), expected.spans(), layer, from, to);
      const auto link = std::make_shared<PlacingLink>(target.spans());
      link->want([&] { return wanted; });
      const auto route = make_sock_route(source.spans(), nullptr, link);
      WriteRequest request;
      request.transfer = 7;
      request.strips = gather ? layer : pieces;
      request.from = from;
      request.to = to;
      request.merge = gather;
      request.gather = gather;
      request.deadline_ns = monotonic_ns() + 30 * testing::kSecondNs;
      const WriteOutcome outcome = route->write(request);
      CHECK(target == expected);
      CHECK(outcome.calls == (gather ? 1 : 64));  // however slow the link is
      if (wanted == kPayloadBytesMax) CHECK(link->frames() == outcome.calls);
    }
  }
}

TEST_CASE("what frames of one piece cost is learnt apart from what frames of many cost") {
  Dice dice(3);
  constexpr std::uint32_t kBlocks = 64;
  testing::BlockMemory memory(dice, testing::plain_shape(kBlocks, {128}), {});
  testing::BlockMemory target(dice, testing::plain_shape(kBlocks, {128}), {});
  const BlockStrip whole{0, 0, 128};
  std::vector<Address> all;
  for (std::uint32_t i = 0; i < kBlocks; ++i) all.push_back(make_address(0, Medium::kHbm, 0, i));
  const auto route = make_sock_route(memory.spans(), nullptr, std::make_shared<PlacingLink>(target.spans()));
  const MediaSet hbm = media_set_of(Medium::kHbm);
  const auto us = [&](bool gather) {
    return route->estimate_us(hbm, hbm, {kBlocks, kBlocks * 128, gather}, monotonic_ns());
  };
  const double together = us(true);
  const double apart = us(false);
  CHECK(apart > 2 * together);
  WriteRequest request;
  request.transfer = 7;
  request.strips = {&whole, 1};
  request.from = all;
  request.to = all;
  request.merge = request.gather = false;
  request.deadline_ns = monotonic_ns() + 30 * testing::kSecondNs;
  route->write(request);
  CHECK(us(true) == together);
  CHECK(us(false) != apart);
}

TEST_CASE("a strip that takes several frames of sock is one call, and so are strips that share one") {
  Dice dice(9);
  const auto calls_of = [&](std::size_t bytes, std::uint32_t blocks, bool gather) {
    testing::BlockMemory memory(dice, testing::plain_shape(blocks, {bytes}), {});
    testing::BlockMemory target(dice, testing::plain_shape(blocks, {bytes}), {});
    const BlockStrip whole{0, 0, bytes};
    std::vector<Address> all;
    for (std::uint32_t i = 0; i < blocks; ++i) all.push_back(make_address(0, Medium::kHbm, 0, i));
    const auto link = std::make_shared<PlacingLink>(target.spans());
    const auto route = make_sock_route(memory.spans(), nullptr, link);
    WriteRequest request;
    request.transfer = 7;
    request.strips = {&whole, 1};
    request.from = all;
    request.to = all;
    request.gather = gather;
    request.deadline_ns = monotonic_ns() + 30 * testing::kSecondNs;
    return route->write(request).calls;
  };
  CHECK(calls_of((std::size_t{9} << 20) + 5, 2, true) == 2);
  CHECK(calls_of((std::size_t{9} << 20) + 5, 2, false) == 2);
  CHECK(calls_of(std::size_t{1} << 20, 10, true) == 3);
  CHECK(calls_of(std::size_t{1} << 20, 10, false) == 10);
}

TEST_CASE("a sock write reports that it is refused or that its link ends") {
  Dice dice(5);
  const Trial trial(dice, 20, 100, 100);
  REQUIRE(trial.from.size() > 1);
  const testing::BlockMemory before(trial.target);
  const auto link = std::make_shared<PlacingLink>(trial.target.spans());
  const auto route = make_sock_route(trial.source.spans(), nullptr, link);
  CHECK(std::string(route->name()) == "sock");
  CHECK_FALSE(route->traits().one_sided);
  CHECK(route->reaches(Medium::kHbm));
  link->fail_after(0);
  CHECK(code_of([&] { route->write(trial.request()); }) == ErrorCode::kPeerLost);
  testing::check_refusals(*route, trial);
  CHECK(trial.target == before);
  CHECK_FALSE(link->closed());
}

// A body of two ranges and three blocks for `target`, and the payload's length.
struct Sample {
  explicit Sample(Dice& dice) {
    const auto blocks = testing::random_blocks(dice, 10, 3);
    const std::vector<BlockStrip> strips{{0, 10, 20}, {0, 40, 24}};
    write_data_body(strips, blocks, body);
    payload_bytes = 3 * 44;
  }
  Bytes body;
  std::uint64_t payload_bytes;
};

void put(Bytes& body, std::size_t at, std::uint64_t value, std::size_t bytes) {
  std::memcpy(body.data() + at, &value, bytes);
}

TEST_CASE("a data body with any wrong number is refused") {
  Dice dice(4);
  const testing::BlockMemory target = testing::BlockMemory::random(dice, 10, 64);
  const Sample sample(dice);
  const auto refused = [&](const Bytes& body, std::uint64_t payload_bytes) {
    return code_of([&] { read_data_body(body, payload_bytes, target.spans()); }) == ErrorCode::kProtocol;
  };
  const auto with = [&](std::size_t at, std::uint64_t value, std::size_t bytes) {
    Bytes body = sample.body;
    put(body, at, value, bytes);
    return refused(body, sample.payload_bytes);
  };
  CHECK_FALSE(refused(sample.body, sample.payload_bytes));
  CHECK(refused(sample.body, sample.payload_bytes + 1));
  CHECK(refused(sample.body, sample.payload_bytes + 3));
  CHECK(refused(sample.body, 0));
  CHECK(refused({}, sample.payload_bytes));
  constexpr std::size_t kRanges = 0, kFirstAt = 4, kFirstBytes = 12, kSecondAt = 20, kBlocks = 36, kFirstBlock = 40;
  CHECK(with(kRanges, 1, 4));
  CHECK(with(kRanges, 0, 4));
  CHECK(with(kRanges, UINT32_MAX, 4));
  CHECK(with(kRanges, kDataRangesMax + 1, 4));
  CHECK(with(kFirstAt, 45, 8));          // beyond the content
  CHECK(with(kFirstAt, UINT64_MAX, 8));  // overflows
  CHECK(with(kFirstBytes, 0, 8));
  CHECK(with(kFirstBytes, UINT64_MAX, 8));
  CHECK(with(kFirstBytes, 21, 8));  // not the payload's length
  CHECK(with(kSecondAt, 29, 8));    // overlaps the first
  CHECK_FALSE(with(kSecondAt, 30, 8));
  CHECK(with(kBlocks, 2, 4));
  CHECK(with(kBlocks, 4, 4));
  CHECK(with(kFirstBlock, 0, 8));
  CHECK(with(kFirstBlock, make_address(0, Medium::kHbm, 0, 10), 8));
  CHECK(with(kFirstBlock, make_address(0, static_cast<Medium>(4), 0, 0), 8));
  Bytes longer = sample.body;
  longer.push_back(std::byte{0});
  CHECK(refused(longer, sample.payload_bytes));
}

TEST_CASE("the payload of any data body goes into the blocks' content or nowhere") {
  for (const std::uint64_t seed : testing::FuzzTime()) {
    testing::announce_fuzz("data body", seed);
    Dice dice(seed);
    const testing::BlockMemory target = testing::BlockMemory::random(dice, 10, 64);
    int accepted = 0;
    for (int round = 0; round < testing::fuzz_length(20000); ++round) {
      Sample sample(dice);
      for (std::uint32_t changes = dice.below(3); changes > 0; --changes) {
        const std::size_t at = dice.below(sample.body.size());
        if (dice.one_in(3)) {
          put(sample.body, at, dice.below(70), 1);
        } else if (dice.one_in(2)) {
          sample.body[at] ^= static_cast<std::byte>(1U << dice.below(8));
        } else {
          sample.body.resize(at);
          break;
        }
      }
      if (dice.one_in(4)) sample.payload_bytes = dice.below(300);
      DataBody body;
      try {
        body = read_data_body(sample.body, sample.payload_bytes, target.spans());
      } catch (const Error& error) {
        REQUIRE(error.code() == ErrorCode::kProtocol);
        continue;
      }
      ++accepted;
      std::uint64_t bytes = 0;
      for (const iovec& piece : data_placement(body, target.spans())) {
        std::memset(piece.iov_base, 0, piece.iov_len);  // AddressSanitizer looks at it
        bytes += piece.iov_len;
      }
      REQUIRE(bytes == sample.payload_bytes);
    }
    CHECK(accepted > 0);
  }
}

}  // namespace
}  // namespace kvpool
