#include "kvpool/pool/disk_record.h"

#include <doctest/doctest.h>

#include <cstring>
#include <numeric>

using namespace kvpool;  // NOLINT(google-build-using-namespace)

namespace {

std::vector<Token> page(Token first) {
  std::vector<Token> tokens(4);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

std::vector<Token> tokens_of(const DiskRecord& record) {
  std::vector<Token> tokens(record.tokens.size() / sizeof(Token));
  std::memcpy(tokens.data(), record.tokens.data(), record.tokens.size());
  return tokens;
}

}  // namespace

TEST_CASE("the record of a first page says its tokens and its namespace") {
  const auto bytes = encode_record(std::nullopt, page(-3), "tenant/7");
  const auto record = decode_record(bytes, 4);
  REQUIRE(record);
  CHECK_FALSE(record->parent);
  CHECK(record->name_space == "tenant/7");
  CHECK(tokens_of(*record) == page(-3));
  CHECK(bytes.size() == record_bytes(4) + 8);
}

TEST_CASE("the record of another page says which entry comes before it") {
  const auto bytes = encode_record(DiskPlace{9, 1234}, page(5), "not stored");
  const auto record = decode_record(bytes, 4);
  REQUIRE(record);
  CHECK(record->parent == DiskPlace{9, 1234});
  CHECK(record->name_space.empty());
  CHECK(tokens_of(*record) == page(5));
}

TEST_CASE("what is no record of such a page is refused") {
  const auto good = encode_record(std::nullopt, page(1), "name");
  CHECK_FALSE(decode_record(good, 5));
  for (std::size_t length = 0; length < good.size(); ++length) CHECK_FALSE(decode_record({good.data(), length}, 4));
  auto longer = good;
  longer.push_back(std::byte{0});
  CHECK_FALSE(decode_record(longer, 4));
  auto other = good;
  other[0] = std::byte{2};
  CHECK_FALSE(decode_record(other, 4));
  auto huge = good;
  std::memset(huge.data() + 14, 0xFF, 4);  // the number of tokens
  CHECK_FALSE(decode_record(huge, UINT32_MAX));
}

TEST_CASE("a record says whether it is the first, whatever the generation of the entry before it") {
  for (const std::uint64_t generation : {std::uint64_t{0}, std::uint64_t{1} << 32, ~std::uint64_t{0}}) {
    const auto bytes = encode_record(DiskPlace{9, generation}, page(5), "not stored");
    const auto record = decode_record(bytes, 4);
    REQUIRE(record);
    CHECK(record->parent == DiskPlace{9, generation});
    CHECK(record->name_space.empty());
  }
  auto other = encode_record(std::nullopt, page(1), "name");
  other[1] = std::byte{2};
  CHECK_FALSE(decode_record(other, 4));
}
