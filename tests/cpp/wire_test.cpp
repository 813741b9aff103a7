#include "kvpool/net/wire.h"

#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "kvpool/net/frame.h"

using namespace kvpool;

namespace {

Bytes bytes_of(std::initializer_list<int> values) {
  Bytes bytes;
  for (const int value : values) bytes.push_back(static_cast<std::byte>(value));
  return bytes;
}

template <class Call>
std::string protocol_error(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::kProtocol);
    return error.what();
  }
  FAIL("no error");
  return {};
}

}  // namespace

TEST_CASE("numbers stand on the wire with their low byte first and without padding") {
  Bytes out;
  WireWriter(out).number(std::uint8_t{1}).number(std::uint32_t{0x05040302}).number(std::uint16_t{0x0706});
  WireWriter(out).number(std::uint64_t{0x0F0E0D0C0B0A0908});
  CHECK(out == bytes_of({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}));
}

TEST_CASE("texts, blobs and lists are preceded by their count") {
  Bytes out;
  const std::vector<std::uint16_t> list{0x0201, 0x0403};
  WireWriter(out).text("ab").blob(bytes_of({9})).array(std::span<const std::uint16_t>(list));
  CHECK(out == bytes_of({2, 0, 0, 0, 'a', 'b', 1, 0, 0, 0, 9, 2, 0, 0, 0, 1, 2, 3, 4}));
}

TEST_CASE("all that was written is read, and then nothing is left") {
  Bytes out;
  const std::vector<std::uint64_t> list{1, ~0ULL, 3};
  WireWriter(out).number(std::uint64_t{77}).text("name").text("").blob(bytes_of({1, 2})).blob({});
  WireWriter(out).array(std::span<const std::uint64_t>(list)).array(std::span<const std::uint64_t>());
  WireReader in(out);
  CHECK(in.number<std::uint64_t>() == 77);
  CHECK(in.text(4) == "name");
  CHECK(in.text(0).empty());
  CHECK(in.blob(2).size() == 2);
  CHECK(in.blob(2).empty());
  CHECK(in.array<std::uint64_t>(3) == list);
  CHECK(in.left() == 4);
  CHECK_THROWS_AS(in.finish(), Error);
  CHECK(in.array<std::uint64_t>(3).empty());
  CHECK_NOTHROW(in.finish());
}

TEST_CASE("a message that ends too early is refused at every byte") {
  Bytes out;
  const std::vector<std::uint32_t> list{1, 2, 3};
  WireWriter(out).number(std::uint32_t{7}).text("some text").array(std::span<const std::uint32_t>(list));
  for (std::size_t length = 0; length < out.size(); ++length) {
    protocol_error([&] {
      WireReader in(std::span<const std::byte>(out).first(length));
      in.number<std::uint32_t>();
      in.text(100);
      in.array<std::uint32_t>(100);
    });
  }
}

TEST_CASE("a count above the caller's limit is refused, with both numbers") {
  const Bytes three = bytes_of({3, 0, 0, 0, 1, 2, 3});
  CHECK(protocol_error([&] { WireReader(three).text(2); }).find("3 bytes; at most 2") != std::string::npos);
  CHECK(protocol_error([&] { WireReader(three).array<std::uint8_t>(2); }).find("3; at most 2") != std::string::npos);
  CHECK(protocol_error([&] { WireReader(three).finish(); }).find("7 bytes too many") != std::string::npos);
}

TEST_CASE("a count is not trusted before its bytes are there") {
  // 2^32 - 1 elements of 8 bytes: were room made for them first, this would end in bad_alloc.
  Bytes out;
  WireWriter(out).number(~std::uint32_t{0}).number(std::uint64_t{1});
  protocol_error([&] { WireReader(out).array<std::uint64_t>(SIZE_MAX); });
  protocol_error([&] { WireReader(out).text(SIZE_MAX); });
  protocol_error([&] { WireReader(out).blob(SIZE_MAX); });
}

TEST_CASE("a failed read consumes nothing more than the items before it") {
  const Bytes out = bytes_of({1, 0, 0, 0});
  WireReader in(out);
  protocol_error([&] { in.number<std::uint64_t>(); });
  CHECK(in.left() == 4);
  CHECK(in.number<std::uint32_t>() == 1);
}

TEST_CASE("a frame header is 32 bytes with each field at its place in docs/wire.md") {
  FrameHeader header{};
  header.body_bytes = 0x04030201;
  header.kind = 5;
  header.flags = 6;
  header.verb = 0x0807;
  header.sequence = 0x100F0E0D0C0B0A09;
  header.id = 0x1817161514131211;
  header.payload_bytes = 0x1C1B1A19;
  header.lifetime_ms = 0x201F1E1D;
  Bytes out;
  WireWriter(out).raw(&header, sizeof(header));
  Bytes expected;
  for (int i = 1; i <= 32; ++i) expected.push_back(static_cast<std::byte>(i));
  CHECK(out == expected);
}
