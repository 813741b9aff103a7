// Matches at a peer, from both ends, against a peer that follows a script.
#include "kvpool/transfer/peer_match.h"

#include <doctest/doctest.h>

#include <algorithm>

#include "failing_alloc.h"
#include "session_kit.h"

namespace kvpool::testing {
namespace {

// --- the owner ---

// A prompt of so many blocks is cached here, pinned by nobody.
Addresses cache_prompt(SessionKit& kit, Token id, std::size_t pages, Medium medium = Medium::kHbm,
                       std::string_view name_space = "") {
  return insert(kit.pool, prompt(id, pages), alloc(*kit.pool, pages, medium), name_space).canonical;
}

void ask_match(SessionKit& kit, std::uint64_t id, const Tokens& tokens, std::uint32_t hold_ms = 1000,
               const std::string& name_space = "") {
  kit.ask(kMatchVerb, id, write_body(MatchBody{hold_ms, tokens, name_space}));
}

MatchedBody matched_body(SessionKit& kit) {
  const Message message = kit.answer();
  KVPOOL_CHECK(message.kind == FrameKind::kAnswer && message.verb == kMatchVerb.number);
  return read_matched(message.body);
}

std::size_t evicted(SessionKit& kit) { return kit.pool->evict(16, kMixed); }

TEST_CASE("a peer learns which blocks of a prompt are cached, and they stay until it lets go of them") {
  SessionKit kit;
  const Addresses cached = cache_prompt(kit, 1, 3);
  ask_match(kit, 5, prompt(1, 4));
  const MatchedBody body = matched_body(kit);
  CHECK(body.addresses == cached);
  CHECK(body.hold_ms == 1000);
  CHECK(kit.session->match_counts().holds == 1);
  CHECK(kit.session->match_counts().blocks == 3);
  CHECK(evicted(kit) == 0);
  kit.ask(kUnmatchVerb, 6);  // another one
  CHECK(kit.answer().kind == FrameKind::kAnswer);
  CHECK(evicted(kit) == 0);
  kit.ask(kUnmatchVerb, 5);
  CHECK(kit.answer().kind == FrameKind::kAnswer);
  CHECK(kit.session->match_counts().blocks == 0);
  CHECK(evicted(kit) == 3);
}

TEST_CASE("a match ends at the first block that is not cached, of another namespace or of another instance") {
  SessionKit kit;
  static_cast<void>(cache_prompt(kit, 1, 3, Medium::kDram, "tenant"));
  ask_match(kit, 1, prompt(2, 3), 1000, "tenant");
  CHECK(matched_body(kit).addresses.empty());
  ask_match(kit, 2, prompt(1, 3));
  CHECK(matched_body(kit).addresses.empty());
  ask_match(kit, 3, {});
  CHECK(matched_body(kit).addresses.empty());
  CHECK(kit.session->match_counts().holds == 0);
  // Two blocks here, the third at another instance, the fourth here again.
  Addresses mixed = alloc(*kit.pool, 4);
  const Address there = mixed[2];
  mixed[2] = make_address(kPeerInstance, Medium::kHbm, 1, 0);
  static_cast<void>(insert(kit.pool, prompt(4, 4), mixed));
  kit.pool->free(&there, 1);
  ask_match(kit, 4, prompt(4, 4), 1000);
  CHECK(matched_body(kit).addresses == Addresses(mixed.begin(), mixed.begin() + 2));
}

TEST_CASE("a match of a peer does not count as one of this pool's application") {
  SessionKit kit;
  static_cast<void>(cache_prompt(kit, 1, 3));
  const std::uint64_t before = kit.pool->stats().counters.match_calls;
  ask_match(kit, 1, prompt(1, 3));
  CHECK(matched_body(kit).addresses.size() == 3);
  CHECK(kit.pool->stats().counters.match_calls == before);
}

TEST_CASE("a hold ends at its deadline, which the owner's limit bounds, and with the link") {
  SessionKit kit;
  kit.host.limits_of.reserve_max_ns = 2000 * kMs;
  static_cast<void>(cache_prompt(kit, 1, 3));
  SUBCASE("its own") {
    ask_match(kit, 1, prompt(1, 3), 500);
    CHECK(matched_body(kit).hold_ms == 500);
    CHECK(kit.host.tick_at == kit.host.now + 500 * kMs);
    static_cast<void>(kit.session->tick(kit.host.now + 499 * kMs));
    CHECK(evicted(kit) == 0);
    static_cast<void>(kit.session->tick(kit.host.now + 500 * kMs));
  }
  SUBCASE("the owner's") {
    ask_match(kit, 1, prompt(1, 3), UINT32_MAX);
    CHECK(matched_body(kit).hold_ms == 2000);
    static_cast<void>(kit.session->tick(kit.host.now + 1999 * kMs));
    CHECK(evicted(kit) == 0);
    static_cast<void>(kit.session->tick(kit.host.now + 2000 * kMs));
  }
  SUBCASE("the end of the link") {
    ask_match(kit, 1, prompt(1, 3));
    CHECK(matched_body(kit).addresses.size() == 3);
    CHECK(evicted(kit) == 0);
    kit.session->on_closed(Error(ErrorCode::kPeerLost, "gone"));
  }
  CHECK(kit.session->match_counts().holds == 0);
  CHECK(evicted(kit) == 3);
}

TEST_CASE("what one peer may hold by matches is limited, in number and in blocks") {
  SessionKit kit;
  static_cast<void>(cache_prompt(kit, 1, 3));
  SUBCASE("matches") {
    kit.host.limits_of.transfers_max = 2;
    for (const std::uint64_t id : {1, 2}) {
      ask_match(kit, id, prompt(1, 3));
      CHECK(matched_body(kit).addresses.size() == 3);
    }
    ask_match(kit, 3, prompt(1, 3));
    CHECK(kit.refusal() == ErrorCode::kBusy);
    ask_match(kit, 4, prompt(2, 3));  // which finds nothing, and holds nothing
    CHECK(matched_body(kit).addresses.empty());
    kit.ask(kUnmatchVerb, 1);
    CHECK(kit.answer().kind == FrameKind::kAnswer);
    ask_match(kit, 3, prompt(1, 3));
    CHECK(matched_body(kit).addresses.size() == 3);
  }
  SUBCASE("blocks") {
    kit.host.limits_of.matched_max = 5;
    ask_match(kit, 1, prompt(1, 3));
    CHECK(matched_body(kit).addresses.size() == 3);
    ask_match(kit, 2, prompt(1, 3));
    CHECK(kit.refusal() == ErrorCode::kBusy);
    ask_match(kit, 3, prompt(1, 2));
    CHECK(matched_body(kit).addresses.size() == 2);
  }
  // What was refused has pinned nothing.
  for (const std::uint64_t id : {1, 2, 3}) {
    kit.ask(kUnmatchVerb, id);
    CHECK(kit.answer().kind == FrameKind::kAnswer);
  }
  CHECK(evicted(kit) == 3);
}

TEST_CASE("a peer that gives one hold two meanings is disconnected, and has pinned nothing") {
  SessionKit kit;
  static_cast<void>(cache_prompt(kit, 1, 3));
  ask_match(kit, 1, prompt(1, 3));
  CHECK(matched_body(kit).addresses.size() == 3);
  CHECK(code_of([&] { ask_match(kit, 1, prompt(1, 2)); }) == ErrorCode::kProtocol);
  kit.session->on_closed(Error(ErrorCode::kProtocol, "as the link does then"));
  CHECK(evicted(kit) == 3);
}

TEST_CASE("a match that runs out of memory is refused, and pins nothing") {
  int refused = 0;
  int attempts = 0;
  fail_each_allocation([&](auto&& fail) {
    ++attempts;
    SessionKit kit;
    static_cast<void>(cache_prompt(kit, 1, 3));
    Message call{FrameKind::kCall, kMatchVerb.number, 1, write_body(MatchBody{1000, prompt(1, 3), ""}), 0};
    static_cast<void>(fail([&] { kit.session->on_message(std::move(call)); }));
    const bool answered = !kit.link->sent.empty() && kit.link->sent.back().kind == FrameKind::kAnswer;
    if (!answered) {
      ++refused;
      CHECK(kit.session->match_counts().holds <= (kit.link->closed ? 1U : 0U));
    }
    kit.session->on_closed(Error(ErrorCode::kPeerLost, "gone"));
    CHECK(evicted(kit) == 3);
  });
  CHECK(refused > 3);
  CHECK(attempts > refused);
}

// --- the one who asks ---

std::shared_ptr<PeerMatch> begin_match(SessionKit& kit, const Tokens& tokens) {
  MatchRequest request;
  request.peer = "peer";
  request.tokens = tokens;
  request.hold_ns = 1000 * kMs;
  request.deadline_ns = kit.host.now + 100 * kMs;
  auto match = std::make_shared<PeerMatch>(request, kPage);
  match->ask(kit.session);
  return match;
}

void answer_match(SessionKit& kit, std::uint64_t id, std::size_t pages, std::uint32_t hold_ms = 1000) {
  kit.reply(kMatchVerb, id, write_body(MatchedBody{hold_ms, SessionKit::peer_addresses(pages)}));
}

ErrorCode match_failure(const PeerMatch& match) {
  KVPOOL_CHECK(match.done());
  return code_of([&] { match.rethrow_if_failed(); }).value_or(ErrorCode::kAudit);
}

bool lets_go_of(SessionKit& kit, std::uint64_t id) {
  const auto told = std::ranges::count_if(kit.link->sent, [&](const Message& message) {
    return message.kind == FrameKind::kCall && message.verb == kUnmatchVerb.number && message.id == id;
  });
  kit.link->sent.clear();
  return told == 1;
}

TEST_CASE("a match at a peer asks for whole blocks, and is the peer's addresses until it is closed") {
  SessionKit kit;
  Tokens tokens = prompt(1, 3);
  tokens.push_back(7);
  const auto match = begin_match(kit, tokens);
  const Message call = kit.take(kMatchVerb);
  CHECK(std::ranges::equal(read_match(call.body).tokens, prompt(1, 3)));
  CHECK(read_match(call.body).hold_ms == 1000);
  CHECK_FALSE(match->done());
  CHECK_FALSE(match->closed());
  answer_match(kit, call.id, 2);
  CHECK(match->done());
  CHECK_NOTHROW(match->rethrow_if_failed());
  CHECK(match->addresses() == SessionKit::peer_addresses(2));
  CHECK_FALSE(match->closed());
  match->close();
  match->close();
  CHECK(lets_go_of(kit, call.id));
  CHECK(match->closed());
}

TEST_CASE("a match at a peer lets go of what it found when the handle goes, and says nothing of what it did not") {
  SessionKit kit;
  auto match = begin_match(kit, prompt(1, 3));
  const std::uint64_t id = kit.take(kMatchVerb).id;
  SUBCASE("found") {
    answer_match(kit, id, 1);
    match.reset();
    CHECK(lets_go_of(kit, id));
  }
  SUBCASE("found nothing") {
    answer_match(kit, id, 0);
    CHECK_FALSE(match->closed());
    match.reset();
    CHECK(kit.link->sent.empty());
  }
  SUBCASE("refused") {
    kit.refuse(kMatchVerb, id, Error(ErrorCode::kBusy, "too many"));
    CHECK(match_failure(*match) == ErrorCode::kBusy);
    CHECK(match->closed());
    match.reset();
    CHECK(kit.link->sent.empty());
  }
}

TEST_CASE("an answer that nobody waits for any more lets go of the blocks at once") {
  SessionKit kit;
  auto match = begin_match(kit, prompt(1, 3));
  const std::uint64_t id = kit.take(kMatchVerb).id;
  SUBCASE("closed") {
    match->close();
    CHECK(match_failure(*match) == ErrorCode::kCancelled);
  }
  SUBCASE("gone") { match.reset(); }
  SUBCASE("too late") {
    kit.session->tick(kit.host.now += 101 * kMs);
    CHECK(match_failure(*match) == ErrorCode::kDeadline);
    CHECK(kit.link->take().kind == FrameKind::kCancel);
  }
  answer_match(kit, id, 2);
  CHECK(lets_go_of(kit, id));
  if (match != nullptr) CHECK(match->addresses().empty());
}

TEST_CASE("a match at a peer is closed here at its deadline, as the owner has shortened it, and with the link") {
  SessionKit kit;
  const auto match = begin_match(kit, prompt(1, 3));
  const std::uint64_t id = kit.take(kMatchVerb).id;
  const std::int64_t asked_ns = kit.host.now;
  kit.host.now += 30 * kMs;
  answer_match(kit, id, 2, /*hold_ms=*/400);
  CHECK_FALSE(match->closed());
  SUBCASE("its deadline") {
    kit.host.now = asked_ns + 399 * kMs;
    CHECK_FALSE(match->closed());
    kit.host.now = asked_ns + 400 * kMs;
  }
  SUBCASE("the end of the link") { kit.session->on_closed(Error(ErrorCode::kPeerLost, "gone")); }
  CHECK(match->closed());
}

TEST_CASE("a match whose peer is lost, or cannot be asked, says so") {
  SessionKit kit;
  const auto match = begin_match(kit, prompt(1, 3));
  kit.link->sent.clear();
  kit.session->on_closed(Error(ErrorCode::kPeerLost, "gone"));
  CHECK(match_failure(*match) == ErrorCode::kPeerLost);
  CHECK(code_of([&] { static_cast<void>(begin_match(kit, prompt(1, 3))); }) == ErrorCode::kPeerLost);
}

TEST_CASE("an answer that no pool of ours gives ends the link") {
  SessionKit kit;
  const auto match = begin_match(kit, prompt(1, 2));
  const std::uint64_t id = kit.take(kMatchVerb).id;
  SUBCASE("more blocks than the prompt has") { answer_match(kit, id, 3); }
  SUBCASE("blocks of another instance") {
    kit.reply(kMatchVerb, id, write_body(MatchedBody{1, {make_address(kOwnInstance, Medium::kHbm, 1, 0)}}));
  }
  SUBCASE("what is no answer") { kit.reply(kMatchVerb, id, Bytes(3)); }
  CHECK(match_failure(*match) == ErrorCode::kProtocol);
  CHECK(kit.link->closed);
}

TEST_CASE("what does not fit into a message is refused before it is sent") {
  const Tokens long_prompt((kTokenBytesMax / sizeof(Token) / kPage + 1) * kPage);
  const std::string long_name(kNamespaceBytesMax + 1, 'n');
  MatchRequest request;
  CHECK_NOTHROW(PeerMatch(request, kPage));
  request.tokens = long_prompt;
  CHECK(code_of([&] { PeerMatch match(request, kPage); }) == ErrorCode::kArgument);
  request.tokens = {};
  request.name_space = long_name;
  CHECK(code_of([&] { PeerMatch match(request, kPage); }) == ErrorCode::kArgument);
}

}  // namespace
}  // namespace kvpool::testing
