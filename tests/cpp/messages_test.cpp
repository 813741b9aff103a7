#include "kvpool/transfer/messages.h"

#include <doctest/doctest.h>

#include <cstring>

#include "kvpool/transfer/failure.h"
#include "message_length.h"
#include "thrown.h"

namespace kvpool {
namespace {

using testing::check_length;

TEST_CASE("messages are read as they were written, and with no other length") {
  ReserveBody reserve;
  reserve.blocks = 3;
  reserve.medium = kMixed;
  reserve.insert = true;
  reserve.may_evict = false;
  reserve.one_sided = false;
  reserve.lifetime_ms = 77;
  reserve.name_space = "tenant";
  reserve.tokens = {1, -2, 3};
  const ReserveBody got = read_reserve(write_body(reserve));
  CHECK(got.blocks == 3);
  CHECK(got.medium == kMixed);
  CHECK(got.insert);
  CHECK_FALSE(got.may_evict);
  CHECK_FALSE(got.one_sided);
  CHECK(got.lifetime_ms == 77);
  CHECK(got.name_space == "tenant");
  CHECK(got.tokens == reserve.tokens);
  check_length(write_body(reserve), read_reserve);

  CompleteBody complete;
  complete.bytes = 1ULL << 40;
  complete.has_private = complete.has_checksum = complete.insert = true;
  complete.checksum = 5;
  complete.named = {1, 2};
  complete.private_bytes = Bytes(4, std::byte{9});
  complete.name_space = "n";
  complete.tokens = {4};
  const CompleteBody done = read_complete(write_body(complete));
  CHECK(done.bytes == complete.bytes);
  CHECK((done.has_private && done.has_checksum && done.insert));
  CHECK(done.checksum == 5);
  CHECK(done.named == complete.named);
  CHECK(done.private_bytes == complete.private_bytes);
  CHECK(done.tokens == complete.tokens);
  check_length(write_body(complete), read_complete);

  const FetchBody fetch{Priority::kBackground, {1, 2, 3}, {4, 5, 6}, true, "shm"};
  const FetchBody asked = read_fetch(write_body(fetch));
  CHECK(asked.priority == Priority::kBackground);
  CHECK(asked.from == fetch.from);
  CHECK(asked.to == fetch.to);
  CHECK(asked.checksum);
  CHECK(asked.route == "shm");
  check_length(write_body(fetch), read_fetch);

  for (const auto checksum : {std::optional<std::uint32_t>(), std::optional<std::uint32_t>(0)}) {
    const Bytes bytes = write_body(FetchedBody{"sock", 3, 1000, checksum});
    const FetchedBody fetched = read_fetched(bytes);
    CHECK(fetched.route == "sock");
    CHECK(fetched.calls == 3);
    CHECK(fetched.write_us == 1000);
    CHECK(fetched.checksum == checksum);
    check_length(bytes, read_fetched);
  }

  const std::vector<Token> tokens{1, -2, 3};
  const MatchBody match{30'000, tokens, "tenant"};
  const Bytes match_bytes = write_body(match);
  const MatchBody wanted = read_match(match_bytes);
  CHECK(wanted.hold_ms == 30'000);
  CHECK(wanted.name_space == "tenant");
  CHECK(std::vector<Token>(wanted.tokens.begin(), wanted.tokens.end()) == tokens);
  check_length(match_bytes, read_match);
  const MatchedBody matched = read_matched(write_body(MatchedBody{7, {1, 2}}));
  CHECK(matched.hold_ms == 7);
  CHECK(matched.addresses == std::vector<Address>{1, 2});
  check_length(write_body(matched), read_matched);

  const Bytes keys(3 * 8, std::byte{7});
  const Bytes keys_bytes = write_body(MatchKeysBody{30'000, true, 8, keys, "kv"});
  const MatchKeysBody sought = read_match_keys(keys_bytes);
  CHECK(sought.hold_ms == 30'000);
  CHECK(sought.every);
  CHECK(sought.key_bytes == 8);
  CHECK(Bytes(sought.keys.begin(), sought.keys.end()) == keys);
  CHECK(sought.cache == "kv");
  check_length(keys_bytes, read_match_keys);
  const MatchedKeysBody stored = read_matched_keys(write_body(MatchedKeysBody{7, {std::byte{5}}, {1, 2}}));
  CHECK(stored.hold_ms == 7);
  CHECK(stored.found == Bytes{std::byte{5}});
  CHECK(stored.addresses == std::vector<Address>{1, 2});
  check_length(write_body(stored), read_matched_keys);

  const LendBody lend{9, Medium::kDram, false};
  CHECK(read_lend(write_body(lend)).blocks == 9);
  CHECK(read_lend(write_body(lend)).medium == Medium::kDram);
  for (std::uint8_t code = 0; code < 32; ++code) {  // behind the number of blocks
    Bytes body = write_body(lend);
    body[sizeof(lend.blocks)] = std::byte{code};
    if (code == 8) {
      CHECK(read_lend(body).medium == kMixed);
    } else if (code >= 1 && code <= 3) {
      CHECK(read_lend(body).medium == kMedia[code - 1U]);
    } else {
      CHECK_THROWS_AS(read_lend(body), Error);
    }
  }
  CHECK_FALSE(read_lend(write_body(lend)).may_evict);
  check_length(write_body(lend), read_lend);
  check_length(write_body(ReservedBody{1, {7, 8}}), read_reserved);
  check_length(write_addresses(std::vector<Address>{7, 8}), read_addresses);
}

TEST_CASE("senseless numbers are refused") {
  Bytes lend = write_body(LendBody{1, Medium::kHbm, true});
  lend[4] = std::byte{0};
  CHECK_THROWS_AS(read_lend(lend), Error);
  lend[4] = std::byte{4};
  CHECK_THROWS_AS(read_lend(lend), Error);
  lend = write_body(LendBody{1, Medium::kHbm, true});
  lend[5] = std::byte{2};
  CHECK_THROWS_AS(read_lend(lend), Error);
  CHECK_THROWS_AS(read_lend(write_body(LendBody{kAddressesMax + 1, Medium::kHbm, true})), Error);
  Bytes fetch = write_body(FetchBody{Priority::kDecode, {1}, {2}});
  fetch[0] = std::byte{3};
  CHECK_THROWS_AS(read_fetch(fetch), Error);
  fetch[0] = std::byte{0};
  fetch[1] = std::byte{1};  // no bit that is known
  CHECK_THROWS_AS(read_fetch(fetch), Error);
  CHECK_THROWS_AS(read_fetch(write_body(FetchBody{Priority::kDecode, {1}, {}})), Error);
  const std::string long_name(kRouteNameBytesMax + 1, 'x');
  CHECK_THROWS_AS(read_fetch(write_body(FetchBody{Priority::kDecode, {1}, {2}, false, long_name})), Error);
  for (const std::string& name : {long_name, std::string("sh\xffm"), std::string("sock\n")}) {
    CHECK_THROWS_AS(read_fetched(write_body(FetchedBody{name, 1, 1, {}})), Error);
  }
  Bytes match = write_body(MatchBody{1, std::vector<Token>{1, 2}, "n"});  // a count of more tokens than there are
  for (const std::uint32_t count : {3U, 5U, 1U << 20, (1U << 20) + 1, UINT32_MAX}) {
    std::memcpy(match.data() + sizeof(std::uint32_t), &count, sizeof(count));
    CHECK_THROWS_AS(read_match(match), Error);
  }
}

TEST_CASE("keys of a senseless length, a part of a key and addresses without a key are refused") {
  const Bytes keys(2 * 8);
  const auto refused = [](const Bytes& bytes) {
    return testing::code_of([&] { static_cast<void>(read_match_keys(bytes)); });
  };
  CHECK_FALSE(refused(write_body(MatchKeysBody{1, false, 8, keys, "kv"})));
  CHECK(refused(write_body(MatchKeysBody{1, false, 7, keys, "kv"})) == ErrorCode::kProtocol);
  CHECK(refused(write_body(MatchKeysBody{1, false, 65, keys, "kv"})) == ErrorCode::kProtocol);
  CHECK(refused(write_body(MatchKeysBody{1, false, 12, keys, "kv"})) == ErrorCode::kProtocol);
  CHECK(refused(write_body(MatchKeysBody{1, false, 8, keys, std::string(256, 'n')})) == ErrorCode::kProtocol);
  CHECK(refused(write_body(MatchKeysBody{1, false, 8, Bytes(kKeyListBytesMax + 8), "kv"})) == ErrorCode::kProtocol);
  Bytes flag = write_body(MatchKeysBody{1, false, 8, keys, "kv"});
  flag[4] = std::byte{2};
  CHECK(refused(flag) == ErrorCode::kProtocol);
  for (const std::size_t addresses : {1, 3}) {
    const Bytes answer = write_body(MatchedKeysBody{1, {std::byte{6}}, std::vector<Address>(addresses, 1)});
    CHECK_THROWS_AS(read_matched_keys(answer), Error);
  }
}

TEST_CASE("a peer hears that a suspended pool is busy, and when to ask again") {
  const Error got = read_error(write_error(Error(ErrorCode::kSuspended, "HBM is suspended")));
  CHECK(got.code() == ErrorCode::kBusy);
  CHECK(std::string(got.what()) == "HBM is suspended");
  REQUIRE(got.fields().size() == 1);
  CHECK(std::string(got.fields()[0].first) == "retry_after_us");
  CHECK(got.fields()[0].second > 0);
}

TEST_CASE("an error keeps its code, its text and those fields that the reader knows") {
  const Error sent(ErrorCode::kOutOfBlocks, std::string(5000, 'x'),
                   {{"free", -1}, {"no such field", 3}, {"active", 2}});
  const Error got = read_error(write_error(sent));
  CHECK(got.code() == ErrorCode::kOutOfBlocks);
  CHECK(std::string(got.what()).size() == 4096);
  REQUIRE(got.fields().size() == 2);
  CHECK(std::string(got.fields()[0].first) == "free");
  CHECK(got.fields()[0].second == -1);
  CHECK(got.fields()[1].second == 2);
  check_length(write_error(Error(ErrorCode::kBusy, "text", {{"free", 1}})), read_error);
  Bytes bytes = write_error(sent);
  for (const std::size_t code :
       {static_cast<std::size_t>(ErrorCode::kFenced), static_cast<std::size_t>(ErrorCode::kDeviceLost), kErrorCodes}) {
    bytes[0] = static_cast<std::byte>(code);
    CHECK_THROWS_AS(read_error(bytes), Error);
  }
}

TEST_CASE("a route failure stays one on the wire, with the number that the library reported") {
  for (const char* field : {"driver_code", "nccl_code"}) {
    const Error got = read_error(write_error(for_peer(Error(ErrorCode::kRouteFailed, "no way", {{field, 7}}))));
    CHECK(got.code() == ErrorCode::kRouteFailed);
    REQUIRE(got.fields().size() == 1);
    CHECK(std::string(got.fields()[0].first) == field);
    CHECK(got.fields()[0].second == 7);
  }
  const Error lost = read_error(write_error(for_peer(Error(ErrorCode::kDeviceLost, "the GPU is gone"))));
  CHECK(lost.code() == ErrorCode::kPeerLost);
}

}  // namespace
}  // namespace kvpool
