// Whatever a peer sends, the readers of its messages throw a protocol or authentication error or return something that
// is in order: they never crash, and never make room for what has not arrived.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "fuzz_seeds.h"
#include "kvpool/net/connect/handshake.h"
#include "kvpool/transfer/messages.h"
#include "metadata_kit.h"

using namespace kvpool;
using namespace kvpool::testing;
using Role = Handshake::Role;

namespace {

Bytes random_bytes(Dice& dice, std::size_t count) {
  Bytes bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(dice.any());
  return bytes;
}

// A number at which code is likely to break.
std::uint64_t nasty_number(Dice& dice) {
  const std::uint64_t corner = std::uint64_t{1} << dice.below(64);
  switch (dice.below(4)) {
    case 0:
      return corner - 1;
    case 1:
      return ~corner + dice.below(3);
    case 2:
      return dice.below(40);
    default:
      return corner + dice.below(3);
  }
}

// Flips, overwrites, cuts, repeats or inserts something.
void mutate(Dice& dice, Bytes& bytes) {
  const std::size_t at = dice.below(bytes.size() + 1);
  const auto position = bytes.begin() + static_cast<std::ptrdiff_t>(at);
  const std::size_t left = bytes.size() - at;
  const std::uint64_t number = nasty_number(dice);
  switch (dice.below(6)) {
    case 0:
      if (left > 0) bytes[at] ^= std::byte{1} << dice.below(8);
      break;
    case 1:
      if (left >= 4) std::memcpy(&bytes[at], &number, 4);
      break;
    case 2:
      if (left >= 8) std::memcpy(&bytes[at], &number, 8);
      break;
    case 3:
      bytes.resize(at);
      break;
    case 4: {
      const Bytes again(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(std::min<std::size_t>(at, 64)));
      bytes.insert(position, again.begin(), again.end());
      break;
    }
    default: {
      const Bytes extra = random_bytes(dice, dice.below(16));
      bytes.insert(position, extra.begin(), extra.end());
    }
  }
}

// True when it threw; anything but these two errors ends the test.
bool refuses(const std::function<void()>& call) {
  try {
    call();
    return false;
  } catch (const Error& error) {
    const bool expected = error.code() == ErrorCode::kProtocol || error.code() == ErrorCode::kAuth;
    if (!expected) FAIL("error code " << static_cast<int>(error.code()) << ": " << error.what());
    return true;
  }
}

// What the reader of metadata guarantees to code that computes with them.
void check_promises(const PeerMetadata& metadata) {
  std::uint64_t block_bytes = 0;
  for (const std::uint64_t bytes : metadata.piece_bytes) {
    REQUIRE(bytes > 0);
    REQUIRE(block_bytes + bytes > block_bytes);
    block_bytes += bytes;
  }
  REQUIRE((metadata.instance > 0 && metadata.instance < 16384 && metadata.incarnation != 0));
  REQUIRE((!metadata.name.empty() && metadata.name.size() <= 255));
  for (const MetadataMedium& medium : metadata.media) {
    REQUIRE(medium.blocks <= 1U << 24);
    REQUIRE((medium.blocks > 0) == !medium.segments.empty());
    unsigned __int128 sum = 0;
    for (const MetadataSegment& segment : medium.segments) {
      REQUIRE((segment.bytes > 0 && segment.stride > 0));  // blocks of a space lie at any unit
      const auto end = static_cast<unsigned __int128>(segment.stride) * medium.blocks + segment.address;
      REQUIRE((end <= UINT64_MAX));
      sum += segment.bytes;
      if (medium.allocations.empty()) continue;
      const std::uint64_t last = segment.address + segment.stride * (medium.blocks - 1) + segment.bytes;
      REQUIRE(std::ranges::any_of(medium.allocations, [&](const MetadataAllocation& allocation) {
        return segment.address >= allocation.address && last <= allocation.address + allocation.bytes;
      }));
    }
    REQUIRE((medium.blocks == 0 || sum == block_bytes));
  }
}

// Reads until the message ends or is refused, with readers chosen by dice.
void read_anyhow(Dice& dice, const Bytes& bytes) {
  WireReader in(bytes);
  while (in.left() > 0) {
    const std::size_t most = dice.one_in(3) ? SIZE_MAX / 64 : dice.below(200);
    const std::size_t before = in.left();
    std::size_t length = 0;
    switch (dice.below(6)) {
      case 0:
        in.number<std::uint8_t>();
        break;
      case 1:
        in.number<std::uint64_t>();
        break;
      case 2:
        length = in.text(most).size();
        break;
      case 3:
        length = in.blob(most).size();
        break;
      case 4:
        length = in.array<MetadataSegment>(most).size();
        break;
      default:
        in.take(dice.below(50));
        in.number<std::uint16_t>();
    }
    REQUIRE(in.left() < before);
    REQUIRE((length <= most && length <= before));
  }
  in.finish();
}

// One body of each kind of message, with something in every field.
Bytes sample_body(std::uint32_t kind) {
  const std::vector<Address> addresses{1, 2, ~Address{0}};
  switch (kind) {
    case 0:
      return write_body(LendBody{7, kMixed, true});
    case 1:
      return write_body(ReserveBody{3, Medium::kDram, true, true, true, 30000, "tenant", {1, -2, 3}});
    case 2:
      return write_body(ReservedBody{2, addresses});
    case 3:
      return write_body(CompleteBody{4096, true, true, true, 77, addresses, Bytes(5), "tenant", {1, 2}});
    case 4:
      return write_body(FetchBody{Priority::kBackground, addresses, addresses, true, "shm"});
    case 5:
      return write_addresses(addresses);
    case 6:
      return write_body(MatchBody{30000, std::vector<Token>{1, -2, 3}, "tenant"});
    case 7:
      return write_body(MatchedBody{30000, addresses});
    case 8:
      return write_body(MatchKeysBody{30000, true, 8, Bytes(24, std::byte{3}), "kv"});
    case 9:
      return write_body(MatchedKeysBody{30000, {std::byte{0x81}, std::byte{1}}, addresses});
    case 10:
      return write_body(FetchedBody{"sock", 3, 1000, 77});
    default:
      return write_error(Error(ErrorCode::kBusy, "too many", {{"limit", 7}, {"retry_after_us", 10000}}));
  }
}

// Reads a body of that kind and writes it again.
Bytes read_and_write(std::uint32_t kind, const Bytes& bytes) {
  switch (kind) {
    case 0:
      return write_body(read_lend(bytes));
    case 1:
      return write_body(read_reserve(bytes));
    case 2:
      return write_body(read_reserved(bytes));
    case 3:
      return write_body(read_complete(bytes));
    case 4:
      return write_body(read_fetch(bytes));
    case 5:
      return write_addresses(read_addresses(bytes));
    case 6:
      return write_body(read_match(bytes));
    case 7:
      return write_body(read_matched(bytes));
    case 8:
      return write_body(read_match_keys(bytes));
    case 9:
      return write_body(read_matched_keys(bytes));
    case 10:
      return write_body(read_fetched(bytes));
    default:
      return write_error(read_error(bytes));
  }
}
constexpr std::uint32_t kBodyKinds = 12;

// Gives bytes to one side, in pieces, and returns how it ended. Its answer is short, whatever it receives.
void feed(Dice& dice, Handshake& side, const Bytes& bytes, Bytes& out) {
  for (std::size_t at = 0; at < bytes.size() && !side.done();) {
    const std::size_t piece = std::min<std::size_t>(1 + dice.below(60), bytes.size() - at);
    const std::size_t taken = side.advance(std::span(bytes).subspan(at, piece), out);
    REQUIRE((taken == piece || side.done()));
    at += piece;
  }
}

}  // namespace

TEST_CASE("random bytes do not break a reader of words") {
  for (const std::uint64_t seed : FuzzTime()) {
    announce_fuzz("wire reader", seed);
    Dice dice(seed);
    for (int round = 0; round < fuzz_length(20000); ++round) {
      Bytes bytes = random_bytes(dice, dice.below(120));
      // Random counts are nearly all too large: make some that fit.
      for (std::byte& byte : bytes) {
        if (dice.one_in(2)) byte = std::byte{0};
      }
      refuses([&] { read_anyhow(dice, bytes); });
    }
  }
}

TEST_CASE("mutated metadata is refused, or keeps the invariants of metadata") {
  for (const std::uint64_t seed : FuzzTime()) {
    announce_fuzz("metadata", seed);
    Dice dice(seed);
    const Bytes good[] = {written(sample_metadata()), written(sample_gpu_metadata())};
    int accepted = 0;
    int refused = 0;
    for (int round = 0; round < fuzz_length(20000); ++round) {
      Bytes bytes = dice.one_in(20) ? random_bytes(dice, dice.below(400)) : good[round % 2];
      for (std::uint32_t i = 0, times = 1 + dice.below(3); i < times; ++i) mutate(dice, bytes);
      const bool threw = refuses([&] {
        WireReader in(bytes);
        const PeerMetadata metadata = read_metadata(in);
        check_promises(metadata);
        // Reading and writing are each other's inverse.
        const Bytes again = written(metadata);
        REQUIRE(again.size() + in.left() == bytes.size());
        REQUIRE(std::memcmp(again.data(), bytes.data(), again.size()) == 0);
      });
      ++(threw ? refused : accepted);
    }
    CHECK(accepted > 0);
    CHECK(refused > accepted);
  }
}

TEST_CASE("a mutated request or answer is refused, or is read in only one way") {
  for (std::uint32_t kind = 0; kind < kBodyKinds; ++kind) {
    const Bytes good = sample_body(kind);
    REQUIRE(read_and_write(kind, good) == good);
    REQUIRE(refuses([&] { read_and_write(kind, Bytes(good.begin(), good.end() - 1)); }));
    REQUIRE(good.size() < kBodyBytesMax);
  }
  for (const std::uint64_t seed : FuzzTime()) {
    announce_fuzz("message bodies", seed);
    Dice dice(seed);
    for (int round = 0; round < fuzz_length(20000); ++round) {
      const std::uint32_t kind = dice.below(kBodyKinds);
      Bytes bytes = dice.one_in(10) ? random_bytes(dice, dice.below(100)) : sample_body(kind);
      for (std::uint32_t i = 0, times = 1 + dice.below(3); i < times; ++i) mutate(dice, bytes);
      refuses([&] {
        const Bytes again = read_and_write(kind, bytes);
        // Two bodies that differ never mean the same, but for fields of errors that are not known here.
        if (kind + 1 < kBodyKinds) REQUIRE(again == bytes);
      });
    }
  }
}

TEST_CASE("the longest requests fit a frame") {
  const std::vector<Address> addresses(kAddressesMax, 1);
  const std::vector<Token> tokens(kTokenBytesMax / sizeof(Token), 1);
  const std::string name_space(kNamespaceBytesMax, 'n');
  const auto fits = [](const Bytes& bytes, std::size_t bytes_max) {
    return bytes.size() <= bytes_max && bytes.size() <= kBodyBytesMax;
  };
  CHECK(fits(write_body(LendBody{1, Medium::kHbm, true}), kLendVerb.request_bytes_max));
  const std::string route(kRouteNameBytesMax, 'x');
  const FetchBody fetch{Priority::kDecode, addresses, addresses, true, route};
  CHECK(fits(write_body(fetch), kFetchVerb.request_bytes_max));
  CHECK(fits(write_body(FetchedBody{route, UINT64_MAX, UINT64_MAX, 1}), kFetchVerb.answer_bytes_max));
  CHECK(fits(write_body(ReserveBody{1, Medium::kHbm, true, true, true, 1, name_space, tokens}),
             kReserveVerb.request_bytes_max));
  CHECK(fits(write_body(ReservedBody{1, addresses}), kReserveVerb.answer_bytes_max));
  CHECK(fits(write_addresses(addresses), kLendVerb.answer_bytes_max));
  CHECK(fits(write_addresses(addresses), kReturnVerb.request_bytes_max));
  CHECK(
      write_body(CompleteBody{1, true, true, true, 1, addresses, Bytes(kPrivateBytesMax), name_space, tokens}).size() <=
      kBodyBytesMax);
}

TEST_CASE("a handshake with random bytes fails, and reveals little") {
  for (const std::uint64_t seed : FuzzTime()) {
    announce_fuzz("handshake garbage", seed);
    Dice dice(seed);
    for (int round = 0; round < fuzz_length(3000); ++round) {
      Handshake side(dice.one_in(2) ? Role::kClient : Role::kServer, "secret");
      side.start();
      Bytes bytes = random_bytes(dice, 200);
      if (dice.one_in(2)) std::memcpy(bytes.data(), "KVPL", 4);
      if (dice.one_in(2)) std::memcpy(bytes.data() + 4, "\1\1\1\0\1\0\0\0", 8);
      if (dice.one_in(2)) std::memcpy(bytes.data() + 4, "\2\1\1\0\1\0\1\0", 8);
      Bytes out;
      REQUIRE(refuses([&] { feed(dice, side, bytes, out); }));
      REQUIRE_FALSE(side.done());
      REQUIRE(out.size() <= 44 + 33);
      REQUIRE(refuses([&] { side.advance(bytes, out); }));
    }
  }
}

TEST_CASE("a handshake that was changed on the way gives neither side the other's keys") {
  for (const std::uint64_t seed : FuzzTime()) {
    announce_fuzz("handshake changed", seed);
    Dice dice(seed);
    int met = 0;
    for (int round = 0; round < fuzz_length(3000); ++round) {
      Handshake client(Role::kClient, "secret");
      Handshake server(Role::kServer, "secret");
      const std::uint32_t changed = dice.below(6);  // of four messages: some conversations go through
      bool differs = false;
      const auto meddle = [&](std::uint32_t message, Bytes& bytes) {
        if (message != changed) return;
        const Bytes before = bytes;
        mutate(dice, bytes);
        differs = before.size() > bytes.size() || std::memcmp(before.data(), bytes.data(), before.size()) != 0;
      };
      Bytes to_server = client.start();
      refuses([&] {
        for (std::uint32_t message = 0; message < 4; message += 2) {
          Bytes to_client;
          meddle(message, to_server);
          feed(dice, server, to_server, to_client);
          to_server.clear();
          meddle(message + 1, to_client);
          feed(dice, client, to_client, to_server);
        }
      });
      REQUIRE_FALSE((differs && client.done()));  // the client gets the last message, and accepts only the true one
      REQUIRE_FALSE((client.done() && !server.done()));
      if (client.done()) {
        REQUIRE(client.keys().send == server.keys().receive);
        ++met;
      }
    }
    CHECK(met > 0);
  }
}
