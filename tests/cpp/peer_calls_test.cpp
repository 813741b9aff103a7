// Calls between two pools, of a verb that only these tests know, against a peer that follows a script.
#include "kvpool/transfer/peer_calls.h"

#include <doctest/doctest.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "session_kit.h"

namespace kvpool::testing {
namespace {

constexpr Verb kEcho{200, "echo", 8, 8};
constexpr Verb kDrop{201, "drop", 8, 8, /*frees_blocks=*/true};
constexpr std::uint64_t kId = 5;

Bytes bytes_of(std::size_t n, int value = 7) { return Bytes(n, static_cast<std::byte>(value)); }

// Serves both verbs, and keeps the calls until the test says something about them.
struct EchoKit : SessionKit {
  explicit EchoKit(PeerCalls::Runs runs = PeerCalls::Runs::kHere) {
    const auto keep = [this](const CallPointer& call, Bytes&& request) {
      if (failure) throw Error(*failure);
      requests.push_back(std::move(request));
      calls.push_back(call);
    };
    session->calls().serve(kEcho, runs, keep);
    session->calls().serve(kDrop, runs, keep);
    session->calls().when_late(kEcho, [this](Message&& answer) { late.push_back(std::move(answer)); });
  }
  ~EchoKit() { calls.clear(); }

  std::optional<Error> failure;
  std::vector<CallPointer> calls;
  std::vector<Bytes> requests;
  std::vector<Message> late;
};

// How a call that was begun has ended.
struct Outcome {
  PeerCalls::Done done() {
    return [this](const Message* said, const Error* error) {
      ++ends;
      if (said != nullptr) answer = said->body;
      if (error != nullptr) code = error->code();
    };
  }
  int ends = 0;
  Bytes answer;
  std::optional<ErrorCode> code;
};

TEST_CASE("a call is answered once, with its verb and its id, by the first thread that answers") {
  EchoKit kit;
  kit.ask(kEcho, kId, bytes_of(3));
  REQUIRE(kit.calls.size() == 1);
  CHECK(kit.requests[0] == bytes_of(3));
  CHECK(kit.link->sent.empty());
  CHECK(kit.calls[0]->deadline_ns() == INT64_MAX);
  kit.calls[0]->answer(bytes_of(2, 9));
  kit.calls[0]->refuse(Error(ErrorCode::kBusy, "too late to say so"));
  kit.calls[0]->answer({});
  kit.calls.clear();
  const Message answer = kit.answer();
  CHECK(answer.kind == FrameKind::kAnswer);
  CHECK(answer.verb == kEcho.number);
  CHECK(answer.id == kId);
  CHECK(answer.body == bytes_of(2, 9));
}

TEST_CASE("a call whose last reference is dropped is refused, and one whose answer cannot be sent ends the link") {
  EchoKit kit;
  kit.ask(kEcho, kId);
  SUBCASE("dropped") {
    kit.calls.clear();
    CHECK(kit.refusal() == ErrorCode::kCancelled);
    CHECK_FALSE(kit.link->closed);
  }
  SUBCASE("not sent") {
    kit.link->busy = true;
    kit.calls[0]->answer({});
    CHECK(kit.link->closed);
    CHECK(kit.link->why == ErrorCode::kBusy);
  }
}

TEST_CASE("a verb without a handler is refused, and the link goes on") {
  EchoKit kit;
  kit.ask(Verb{999, "nothing", 100, 100}, kId, bytes_of(50));
  CHECK(kit.refusal() == ErrorCode::kUnsupported);
  kit.ask(kEcho, kId);
  CHECK(kit.calls.size() == 1);
  CHECK_FALSE(kit.link->closed);
}

TEST_CASE("a handler that throws refuses the call, unless it has read what no pool of ours would send") {
  EchoKit kit;
  SUBCASE("an error") {
    kit.failure.emplace(ErrorCode::kState, "not now");
    kit.ask(kEcho, kId);
    CHECK(kit.refusal() == ErrorCode::kState);
  }
  SUBCASE("nonsense") {
    kit.failure.emplace(ErrorCode::kProtocol, "no such thing");
    CHECK(code_of([&] { kit.ask(kEcho, kId); }) == ErrorCode::kProtocol);
    CHECK(kit.link->sent.empty());
  }
  SUBCASE("a request that is too long, which it does not see") {
    CHECK(code_of([&] { kit.ask(kEcho, kId, bytes_of(kEcho.request_bytes_max + 1)); }) == ErrorCode::kProtocol);
    CHECK(kit.calls.empty());
    CHECK_NOTHROW(kit.ask(kEcho, kId, bytes_of(kEcho.request_bytes_max)));
  }
}

TEST_CASE("the server of a call learns that it is cancelled, by the caller or with the link, and still answers") {
  EchoKit kit;
  kit.ask(kEcho, kId);
  int told = 0;
  kit.calls[0]->when_cancelled([&] { ++told; });
  kit.cancel(kDrop, kId);  // another verb's, an unused number, and an answered one: no effect
  kit.cancel(kEcho, kId + 1);
  kit.cancel(Verb{999, "nothing", 0, 0}, kId);
  CHECK(told == 0);
  SUBCASE("by the caller") {
    kit.cancel(kEcho, kId);
    kit.cancel(kEcho, kId);
    CHECK(told == 1);
    CHECK(kit.calls[0]->cancelled());
    int at_once = 0;
    kit.calls[0]->when_cancelled([&] { ++at_once; });
    CHECK(at_once == 1);
    kit.calls[0]->refuse(Error(ErrorCode::kCancelled, "stopped"));
    CHECK(kit.refusal() == ErrorCode::kCancelled);
  }
  SUBCASE("by its own side, which parts: the caller has not cancelled it") {
    kit.session->stop_writing(Error(ErrorCode::kPeerLost, "closed here"));
    CHECK(told == 1);
    kit.calls[0]->refuse(Error(ErrorCode::kCancelled, "nobody waits for it any more"));
    CHECK(kit.refusal() == ErrorCode::kPeerLost);
  }
  SUBCASE("with the link") {
    kit.session->on_closed(Error(ErrorCode::kPeerLost, "gone"));
    CHECK(told == 1);
    CHECK(kit.calls[0]->cancelled());
  }
  SUBCASE("not after the answer") {
    kit.calls[0]->answer({});
    kit.cancel(kEcho, kId);
    CHECK(told == 0);
  }
}

TEST_CASE("calls of one verb are limited for each peer, except those that free blocks") {
  EchoKit kit;
  kit.host.limits_of.transfers_max = 2;
  for (std::uint64_t id = 1; id <= 2; ++id) kit.ask(kEcho, id);
  kit.ask(kEcho, 1);
  CHECK(kit.refusal() == ErrorCode::kProtocol);  // it is under way
  kit.ask(kEcho, 3);
  CHECK(kit.refusal() == ErrorCode::kBusy);
  for (std::uint64_t id = 1; id <= 3; ++id) kit.ask(kDrop, id);
  CHECK(kit.calls.size() == 5);
  kit.calls[0]->answer({});
  CHECK(kit.answer().id == 1);
  kit.ask(kEcho, 3);
  CHECK(kit.calls.size() == 6);
}

TEST_CASE("a slow handler runs on the host's executor, while its caller waits") {
  EchoKit kit(PeerCalls::Runs::kLater);
  SUBCASE("in time") {
    kit.ask(kEcho, kId, bytes_of(4), 10);
    CHECK(kit.calls.empty());
    kit.host.run_works();
    REQUIRE(kit.calls.size() == 1);
    CHECK(kit.requests[0] == bytes_of(4));
    CHECK(kit.calls[0]->deadline_ns() == kit.host.now + 10 * kMs);
    return;
  }
  SUBCASE("too late") {
    kit.ask(kEcho, kId, {}, 10);
    kit.host.now += 10 * kMs;
    kit.host.run_works();
    CHECK(kit.refusal() == ErrorCode::kDeadline);
  }
  SUBCASE("cancelled") {
    kit.ask(kEcho, kId);
    kit.cancel(kEcho, kId);
    kit.host.run_works();
    CHECK(kit.refusal() == ErrorCode::kCancelled);
  }
  SUBCASE("nonsense") {
    kit.failure.emplace(ErrorCode::kProtocol, "no such thing");
    kit.ask(kEcho, kId);
    kit.host.run_works();
    CHECK(kit.link->closed);
    CHECK(kit.link->why == ErrorCode::kProtocol);
  }
  SUBCASE("too many bytes that wait") {
    kit.host.limits_of.request_bytes_max = 12;
    kit.ask(kEcho, 1, bytes_of(8));
    kit.ask(kEcho, 2, bytes_of(8));
    CHECK(kit.refusal() == ErrorCode::kBusy);
    kit.host.run_works();
    REQUIRE(kit.calls.size() == 1);
    kit.calls[0]->answer({});
    kit.link->sent.clear();
    kit.calls.clear();
    kit.ask(kEcho, 3, bytes_of(8));
    kit.host.run_works();
    CHECK(kit.calls.size() == 1);
    return;
  }
  CHECK(kit.calls.empty());
}

TEST_CASE("a call that was begun ends once: answered, refused, too late or lost") {
  EchoKit kit;
  Outcome outcome;
  kit.session->calls().begin(kEcho, kId, bytes_of(3), kit.host.now + 10 * kMs, outcome.done());
  const Message call = kit.take(kEcho);
  CHECK(call.id == kId);
  CHECK(call.body == bytes_of(3));
  CHECK(call.lifetime_ms == 11);
  CHECK(kit.host.tick_at == kit.host.now + 10 * kMs);
  CHECK(kit.session->under_way() == 1);
  SUBCASE("answered") {
    kit.reply(kEcho, kId, bytes_of(2));
    CHECK(outcome.answer == bytes_of(2));
    CHECK_FALSE(outcome.code.has_value());
  }
  SUBCASE("refused") {
    kit.refuse(kEcho, kId, Error(ErrorCode::kState, "no"));
    CHECK(outcome.code == ErrorCode::kState);
  }
  SUBCASE("too late: the peer is told that no one waits") {
    CHECK(kit.session->tick(kit.host.now + 9 * kMs) == kit.host.now + 10 * kMs);
    CHECK(outcome.ends == 0);
    kit.session->tick(kit.host.now + 10 * kMs);
    CHECK(outcome.code == ErrorCode::kDeadline);
    const Message cancel = kit.link->take();
    CHECK(cancel.kind == FrameKind::kCancel);
    CHECK(cancel.verb == kEcho.number);
    CHECK(cancel.id == kId);
    kit.reply(kEcho, kId, bytes_of(2));
    REQUIRE(kit.late.size() == 1);
    CHECK(kit.late[0].body == bytes_of(2));
  }
  SUBCASE("lost") {
    kit.session->on_closed(Error(ErrorCode::kPeerLost, "gone"));
    CHECK(outcome.code == ErrorCode::kPeerLost);
    CHECK(code_of([&] { kit.session->calls().begin(kEcho, 9, {}, INT64_MAX, outcome.done()); }) ==
          ErrorCode::kPeerLost);
  }
  CHECK(outcome.ends == 1);
  CHECK(kit.session->under_way() == 0);
}

TEST_CASE("a call that cannot be sent has not begun, and an answer that is too long ends the link") {
  EchoKit kit;
  Outcome outcome;
  kit.link->busy = true;
  CHECK(code_of([&] { kit.session->calls().begin(kEcho, kId, {}, kit.host.now + kMs, outcome.done()); }) ==
        ErrorCode::kBusy);
  CHECK(outcome.ends == 0);
  CHECK(kit.session->under_way() == 0);
  kit.link->busy = false;
  kit.session->calls().begin(kEcho, kId, {}, kit.host.now + kMs, outcome.done());
  CHECK(code_of([&] { kit.reply(kEcho, kId, bytes_of(kEcho.answer_bytes_max + 1)); }) == ErrorCode::kProtocol);
  CHECK(outcome.ends == 0);
}

// Recovery asks which blocks are lost as soon as one caller was told, when the session may not have been.
TEST_CASE("a session says that its peer is lost no later than a caller is told so") {
  EchoKit kit;
  Outcome outcome;
  SUBCASE("a call that is begun finds the link closed") {
    kit.link->closed = true;
    CHECK(code_of([&] { kit.session->calls().begin(kEcho, kId, {}, INT64_MAX, outcome.done()); }) ==
          ErrorCode::kPeerLost);
  }
  SUBCASE("a call that waits finds it closed") {
    kit.link->closed = true;
    CHECK(code_of([&] { kit.session->calls().call(kEcho, kId, {}, Waiting(kit.host.now + kMs)); }) ==
          ErrorCode::kPeerLost);
  }
  SUBCASE("the peer says it") {
    kit.session->calls().begin(kEcho, kId, {}, INT64_MAX, outcome.done());
    CHECK_FALSE(kit.session->told_lost());
    kit.session->on_message(
        Message{FrameKind::kRefused, kEcho.number, kId, write_error(Error(ErrorCode::kPeerLost, "no lease"))});
    CHECK(outcome.code == ErrorCode::kPeerLost);
  }
  SUBCASE("an answer is one that no pool of ours would send") {
    kit.session->calls().close(Error(ErrorCode::kProtocol, "nonsense"));
  }
  CHECK_FALSE(kit.session->lost());
  CHECK(kit.session->told_lost());
}

TEST_CASE("a refused call does not make the peer a lost one") {
  EchoKit kit;
  Outcome outcome;
  kit.session->calls().begin(kEcho, kId, {}, INT64_MAX, outcome.done());
  kit.session->on_message(
      Message{FrameKind::kRefused, kEcho.number, kId, write_error(Error(ErrorCode::kBusy, "much to do"))});
  CHECK(outcome.code == ErrorCode::kBusy);
  CHECK_FALSE(kit.session->told_lost());
}

TEST_CASE("the header of a call tells how long its body may be") {
  EchoKit kit;
  const auto most = [&](FrameKind kind, std::uint16_t verb) { return kit.session->body_bytes_max(kind, verb); };
  CHECK(most(FrameKind::kCall, kEcho.number) == kEcho.request_bytes_max);
  CHECK(most(FrameKind::kAnswer, kEcho.number) == kEcho.answer_bytes_max);
  CHECK(most(FrameKind::kCall, kAbandonVerb.number) == 0);
  CHECK(most(FrameKind::kAnswer, kReserveVerb.number) == kReserveVerb.answer_bytes_max);
  CHECK(most(FrameKind::kCall, 250) == kBodyBytesMax);  // it is refused, and the link stays
  CHECK(most(FrameKind::kAnswer, 250) == 0);
  // The longest that a pool of ours writes fits.
  const Error longest(ErrorCode::kBusy, std::string(10'000, 'x'),
                      {{"retry_after_us", -1}, {"retry_after_us", -1}, {"retry_after_us", -1}});
  CHECK(write_error(longest).size() <= most(FrameKind::kRefused, kEcho.number));
  CHECK(most(FrameKind::kRefused, kEcho.number) < 8192);
}

TEST_CASE("a caller that waits in a call is answered, refused, or gives up and says so") {
  EchoKit kit;
  const auto call = [&] { return kit.session->calls().call(kEcho, kId, bytes_of(1), kit.host.now + 10 * kMs).body; };
  SUBCASE("answered") {
    kit.link->meanwhile = [&](std::int64_t) {
      kit.reply(kDrop, kId, bytes_of(1));  // of another verb: not the one that is waited for
      kit.reply(kEcho, kId, bytes_of(2));
    };
    CHECK(call() == bytes_of(2));
    CHECK(kit.take(kEcho).lifetime_ms == 11);
  }
  SUBCASE("refused") {
    kit.link->meanwhile = [&](std::int64_t) { kit.refuse(kEcho, kId, Error(ErrorCode::kOutOfBlocks, "none")); };
    CHECK(code_of(call) == ErrorCode::kOutOfBlocks);
  }
  SUBCASE("too late") {
    kit.link->meanwhile = [&](std::int64_t until_ns) { kit.host.now = until_ns; };
    CHECK(code_of(call) == ErrorCode::kDeadline);
    REQUIRE(kit.link->sent.size() == 2);
    CHECK(kit.link->sent[1].kind == FrameKind::kCancel);
    kit.reply(kEcho, kId);
    CHECK(kit.late.size() == 1);
  }
  CHECK(kit.session->under_way() == 0);
}

}  // namespace
}  // namespace kvpool::testing
