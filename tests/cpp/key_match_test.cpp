// Keys that a peer asks for, and asking a peer for keys, against a peer that follows a script; blocks that others fill.
#include <doctest/doctest.h>

#include <algorithm>
#include <string>

#include "failing_alloc.h"
#include "kvpool/pool/keyed_cache.h"
#include "kvpool/pool/keyed_fill.h"
#include "kvpool/transfer/peer_match.h"
#include "session_kit.h"

namespace kvpool::testing {
namespace {

constexpr std::size_t kKeyBytes = 8;

// Keys of these numbers, one after another.
Bytes keys_of(std::initializer_list<int> numbers) {
  Bytes keys;
  for (const int number : numbers) {
    Bytes key(kKeyBytes, std::byte{0x5A});
    key[3] = static_cast<std::byte>(number);
    keys.insert(keys.end(), key.begin(), key.end());
  }
  return keys;
}

struct KeyKit : SessionKit {
  std::shared_ptr<KeyedCache> make_cache(const std::string& name, std::size_t blocks = 6) {
    auto made = std::make_shared<KeyedCache>(pool, kKeyBytes, blocks, name);
    pool->named_caches().add(name, made);
    return made;
  }
  void put(KeyedCache& cache, std::initializer_list<int> numbers) {
    const Bytes rows(numbers.size() * cache.block_bytes(), std::byte{1});
    const Bytes keys = keys_of(numbers);
    cache.save_rows(keys.data(), numbers.size(), rows.data());
  }
  void ask_keys(std::uint64_t id, const Bytes& keys, bool every = false, std::uint32_t hold_ms = 1000,
                std::string_view cache = "kv", std::uint8_t key_bytes = kKeyBytes) {
    ask(kMatchKeysVerb, id, write_body(MatchKeysBody{hold_ms, every, key_bytes, keys, cache}));
  }
  MatchedKeysBody matched_keys() {
    const Message message = answer();
    KVPOOL_CHECK(message.kind == FrameKind::kAnswer && message.verb == kMatchKeysVerb.number);
    return read_matched_keys(message.body);
  }
};

TEST_CASE("a peer learns which keys are stored, and their blocks stay until it lets go of them") {
  KeyKit kit;
  const auto cache = kit.make_cache("kv");
  kit.put(*cache, {1, 2, 4});
  kit.ask_keys(5, keys_of({1, 2, 3, 4}));
  MatchedKeysBody body = kit.matched_keys();
  CHECK(body.found == Bytes{std::byte{0b0011}});
  CHECK(body.addresses.size() == 2);
  CHECK(body.hold_ms == 1000);
  kit.ask_keys(6, keys_of({1, 2, 3, 4}), /*every=*/true);
  body = kit.matched_keys();
  CHECK(body.found == Bytes{std::byte{0b1011}});
  REQUIRE(body.addresses.size() == 3);
  for (const Address address : body.addresses) {
    CHECK(instance_of(address) == kOwnInstance);
    CHECK(medium_of(address) == Medium::kDram);
  }
  CHECK(kit.session->match_counts().holds == 2);
  CHECK(kit.session->match_counts().blocks == 5);
  CHECK(cache->evict(6) == 0);
  CHECK(cache->stats().found_blocks == 0);  // the application has asked for nothing
  kit.ask(kUnmatchVerb, 6);
  CHECK(kit.answer().kind == FrameKind::kAnswer);
  CHECK(cache->evict(6) == 1);
  kit.ask(kUnmatchVerb, 5);
  CHECK(kit.answer().kind == FrameKind::kAnswer);
  CHECK(cache->evict(6) == 2);
  cache->audit();
}

TEST_CASE("a hold of keys ends at its deadline and with the link") {
  KeyKit kit;
  const auto cache = kit.make_cache("kv");
  kit.put(*cache, {1, 2});
  kit.ask_keys(1, keys_of({1, 2}), false, 500);
  CHECK(kit.matched_keys().addresses.size() == 2);
  SUBCASE("deadline") {
    static_cast<void>(kit.session->tick(kit.host.now + 499 * kMs));
    CHECK(cache->evict(2) == 0);
    static_cast<void>(kit.session->tick(kit.host.now + 500 * kMs));
  }
  SUBCASE("link") { kit.session->on_closed(Error(ErrorCode::kPeerLost, "gone")); }
  CHECK(kit.session->match_counts().holds == 0);
  CHECK(cache->evict(2) == 2);
}

TEST_CASE("what is asked of no such cache, or with keys of another length, is refused, and the link stays") {
  KeyKit kit;
  kit.ask_keys(1, keys_of({1}));
  CHECK(kit.refusal() == ErrorCode::kState);
  auto cache = kit.make_cache("kv");
  kit.put(*cache, {1});
  kit.ask_keys(2, keys_of({1}), false, 1000, "other");
  CHECK(kit.refusal() == ErrorCode::kState);
  kit.ask_keys(3, Bytes(32), false, 1000, "kv", 16);
  CHECK(kit.refusal() == ErrorCode::kArgument);
  kit.ask_keys(4, {});
  CHECK(kit.matched_keys().addresses.empty());
  CHECK(kit.session->match_counts().holds == 0);
  CHECK_FALSE(kit.link->closed);
  cache->close();
  kit.ask_keys(5, keys_of({1}));
  CHECK(kit.refusal() == ErrorCode::kState);
  cache = kit.make_cache("kv");  // the name is free again
  CHECK(code_of([&] { kit.make_cache("kv"); }) == ErrorCode::kState);
  CHECK(code_of([&] { kit.make_cache(""); }) == ErrorCode::kArgument);
  cache.reset();
  kit.ask_keys(6, keys_of({1}));
  CHECK(kit.refusal() == ErrorCode::kState);
}

TEST_CASE("what a peer may hold of keys is limited together with prompts") {
  KeyKit kit;
  const auto cache = kit.make_cache("kv");
  kit.put(*cache, {1, 2, 3});
  kit.host.limits_of.matched_max = 4;
  kit.ask_keys(1, keys_of({1, 2, 3}));
  CHECK(kit.matched_keys().addresses.size() == 3);
  kit.ask_keys(2, keys_of({1, 2}));
  CHECK(kit.refusal() == ErrorCode::kBusy);
  kit.ask(kUnmatchVerb, 1);
  CHECK(kit.answer().kind == FrameKind::kAnswer);
  CHECK(cache->evict(3) == 3);  // what was refused has pinned nothing
}

TEST_CASE("a match of keys that runs out of memory is refused, and pins nothing") {
  int refused = 0;
  fail_each_allocation([&](auto&& fail) {
    KeyKit kit;
    const auto cache = kit.make_cache("kv");
    kit.put(*cache, {1, 2});
    const Bytes keys = keys_of({1, 2});
    Message call{FrameKind::kCall, kMatchKeysVerb.number, 1, write_body(MatchKeysBody{1000, true, 8, keys, "kv"}), 0};
    static_cast<void>(fail([&] { kit.session->on_message(std::move(call)); }));
    if (kit.link->sent.empty() || kit.link->sent.back().kind != FrameKind::kAnswer) ++refused;
    kit.session->on_closed(Error(ErrorCode::kPeerLost, "gone"));
    CHECK(cache->evict(2) == 2);
  });
  CHECK(refused > 3);
}

// --- the one who asks ---

std::shared_ptr<PeerMatch> begin_key_match(KeyKit& kit, const Bytes& keys) {
  KeyMatchRequest request;
  request.peer = "peer";
  request.cache = "kv";
  request.key_bytes = kKeyBytes;
  request.keys = keys;
  request.every = true;
  request.hold_ns = 1000 * kMs;
  request.deadline_ns = kit.host.now + 100 * kMs;
  auto match = std::make_shared<PeerMatch>(request);
  match->ask(kit.session);
  return match;
}

TEST_CASE("asking a peer for keys says which of them it holds, until it is closed") {
  KeyKit kit;
  const Bytes keys = keys_of({1, 2, 3});
  const auto match = begin_key_match(kit, keys);
  const Message call = kit.take(kMatchKeysVerb);
  const MatchKeysBody asked = read_match_keys(call.body);
  CHECK(std::ranges::equal(asked.keys, keys));
  CHECK((asked.every && asked.key_bytes == kKeyBytes && asked.cache == "kv" && asked.hold_ms == 1000));
  kit.reply(kMatchKeysVerb, call.id,
            write_body(MatchedKeysBody{1000, {std::byte{0b101}}, SessionKit::peer_addresses(2)}));
  REQUIRE(match->done());
  CHECK_NOTHROW(match->rethrow_if_failed());
  CHECK(match->addresses() == SessionKit::peer_addresses(2));
  CHECK((match->has(0) && !match->has(1) && match->has(2)));
  match->close();
  CHECK(kit.take(kUnmatchVerb).id == call.id);
}

TEST_CASE("an answer for other keys than were asked for ends the link") {
  for (const Bytes& found : {Bytes{}, Bytes{std::byte{0b1001}}, Bytes{std::byte{0b11}, std::byte{0}}}) {
    KeyKit kit;
    const auto match = begin_key_match(kit, keys_of({1, 2, 3}));
    const std::uint64_t id = kit.take(kMatchKeysVerb).id;
    kit.reply(kMatchKeysVerb, id,
              write_body(MatchedKeysBody{1000, found, SessionKit::peer_addresses(found.empty() ? 0 : 2)}));
    REQUIRE(match->done());
    CHECK(code_of([&] { match->rethrow_if_failed(); }) == ErrorCode::kProtocol);
    CHECK(kit.link->closed);
    CHECK(match->closed());
  }
}

TEST_CASE("a late answer for keys lets go of the blocks at once") {
  KeyKit kit;
  const auto match = begin_key_match(kit, keys_of({1}));
  const std::uint64_t id = kit.take(kMatchKeysVerb).id;
  static_cast<void>(kit.session->tick(kit.host.now + 100 * kMs));
  REQUIRE(match->done());
  CHECK(code_of([&] { match->rethrow_if_failed(); }) == ErrorCode::kDeadline);
  kit.link->sent.clear();
  kit.reply(kMatchKeysVerb, id, write_body(MatchedKeysBody{1000, {std::byte{1}}, SessionKit::peer_addresses(1)}));
  CHECK(kit.take(kUnmatchVerb).id == id);
}

TEST_CASE("a question with more keys than a message holds is refused here") {
  KeyMatchRequest request;
  request.peer = "peer";
  request.key_bytes = kKeyBytes;
  const Bytes keys(kKeyListBytesMax + kKeyBytes);
  request.keys = keys;
  CHECK(code_of([&] { const PeerMatch match(request); }) == ErrorCode::kArgument);
}

// --- blocks that somebody else fills ---

TEST_CASE("a fill takes blocks for what is not stored, and gives back what is not committed") {
  KeyKit kit;
  const auto cache = kit.make_cache("kv", 4);
  kit.put(*cache, {1, 2});
  const Bytes keys = keys_of({1, 3, 3, 4});
  {
    KeyedFill fill(cache, keys.data(), 4);
    CHECK(fill.positions() == std::vector<std::size_t>{1, 3});
    CHECK(fill.addresses().size() == 2);
    CHECK(cache->exists(keys.data(), 4, nullptr) == 1);
    const Bytes more = keys_of({5, 6, 7, 8});
    CHECK(code_of([&] { const KeyedFill other(cache, more.data(), 4); }) == ErrorCode::kOutOfBlocks);
    CHECK(cache->evict(4) == 1);  // the first is pinned
  }
  CHECK(cache->stats().blocks == 1);
  {
    KeyedFill fill(cache, keys.data(), 4);
    CHECK(fill.commit() == 2);
    CHECK(fill.commit() == 0);
  }
  CHECK(cache->exists(keys.data(), 4, nullptr) == 4);
  CHECK(cache->stats().blocks == 3);
  cache->audit();
}

TEST_CASE("a cache that is closed after a peer has found it is one that is not there, and the pool is not lost") {
  KeyKit kit;
  const auto cache = kit.make_cache("kv");
  const auto found = kit.pool->named_caches().find("kv");
  cache->close();
  const Bytes keys = keys_of({1});
  std::vector<KeyedEntry*> pins;
  Address address = 0;
  bool stored = false;
  const auto match = [&] { found->match_for_peer(keys.data(), 1, /*every=*/false, pins, &address, &stored); };
  CHECK(code_of(match) == ErrorCode::kState);
}

TEST_CASE("of two fills of one key the first stays, and the other block goes back") {
  KeyKit kit;
  const auto cache = kit.make_cache("kv", 4);
  const Bytes keys = keys_of({1, 2});
  KeyedFill first(cache, keys.data(), 2);
  KeyedFill second(cache, keys.data(), 1);
  CHECK(first.commit() == 2);
  CHECK(second.commit() == 0);
  first.close();
  second.close();
  CHECK(cache->stats().blocks == 2);
  CHECK(cache->evict(4) == 2);
  CHECK(kit.count(BlockState::kActive, Medium::kDram) == 0);
}

TEST_CASE("a fill of a cache that is closed meanwhile stores nothing and gives its blocks back") {
  KeyKit kit;
  const auto cache = kit.make_cache("kv", 4);
  const Bytes keys = keys_of({1, 2});
  {
    KeyedFill fill(cache, keys.data(), 2);
    cache->close();
    CHECK(code_of([&] { fill.commit(); }) == ErrorCode::kClosed);
  }
  CHECK(kit.count(BlockState::kActive, Medium::kDram) == 0);
}

}  // namespace
}  // namespace kvpool::testing
