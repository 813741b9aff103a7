// The sending half of the protocol, and fetches, against a peer that follows a script: phases, steps and statistics.
#include <doctest/doctest.h>

#include <atomic>
#include <memory>
#include <thread>

#include "outgoing_kit.h"
#include "soon.h"
#include "thrown.h"

namespace kvpool::testing {
namespace {

using outgoing::is_unread;
using outgoing::request_for;
using outgoing::reserved;

TEST_CASE("a transfer reserves, writes, completes and is done when the receiver says so") {
  SessionKit kit;
  TransferRequest request = request_for(kit, 2);
  const Addresses from = request.from;
  const auto transfer = kit.session->transfer(std::move(request));
  const Message ask = kit.link->take();
  CHECK(ask.verb == kReserveVerb.number);
  CHECK(kit.host.tick_at == kit.host.now + 100 * kMs);
  kit.reply(kReserveVerb, ask.id, reserved(SessionKit::peer_addresses(2)));
  REQUIRE(kit.host.writes.size() == 1);
  CHECK(kit.link->sent.empty());
  kit.host.end_write();
  const Message complete = kit.link->take();
  CHECK(complete.verb == kCompleteVerb.number);
  CHECK(read_complete(complete.body).bytes == kit.bytes_of(2));
  CHECK_FALSE(transfer->done());
  kit.reply(kCompleteVerb, ask.id, write_addresses({}));
  CHECK(transfer->done());
  CHECK_NOTHROW(transfer->rethrow_if_failed());
  CHECK(transfer->addresses() == SessionKit::peer_addresses(2));
  CHECK(is_unread(kit, from));
}

TEST_CASE("wrong answers of a peer are detected") {
  SessionKit kit;
  const auto transfer = kit.session->transfer(request_for(kit, 2));
  const std::uint64_t id = kit.link->take().id;
  const auto say = [&](const Verb& verb, Bytes body) { return code_of([&] { kit.reply(verb, id, std::move(body)); }); };
  CHECK(say(kReserveVerb, reserved(SessionKit::peer_addresses(1))) == ErrorCode::kProtocol);
  CHECK(say(kReserveVerb, reserved(SessionKit::peer_addresses(3))) == ErrorCode::kProtocol);
  CHECK(say(kReserveVerb, reserved(SessionKit::peer_addresses(1), 1)) == ErrorCode::kProtocol);
  CHECK(say(kReserveVerb, reserved(SessionKit::peer_addresses(2, kPeerBlocks - 1))) == ErrorCode::kProtocol);
  CHECK(say(kReserveVerb, reserved({1, 2})) == ErrorCode::kProtocol);
  CHECK(say(kReserveVerb, Bytes(kReserveVerb.answer_bytes_max + 1)) == ErrorCode::kProtocol);
  CHECK(say(kCompleteVerb, write_addresses({})) == ErrorCode::kProtocol);
  CHECK(say(kLendVerb, write_addresses({})) == ErrorCode::kProtocol);
  CHECK(say(Verb{99, "nothing", 0, 0}, {}) == ErrorCode::kProtocol);
  CHECK(code_of([&] { kit.say(FrameKind::kData, id); }) == ErrorCode::kProtocol);
  CHECK_NOTHROW(kit.reply(kCompleteVerb, id + 99, write_addresses({})));  // no call asked for it: no one is told
  CHECK_FALSE(transfer->done());
}

TEST_CASE("a refusal at each phase ends the transfer, and the sources are free") {
  SessionKit kit;
  TransferRequest request = request_for(kit, 2);
  const Addresses from = request.from;
  const auto transfer = kit.session->transfer(std::move(request));
  const std::uint64_t id = kit.link->take().id;
  const Error busy(ErrorCode::kBusy, "later", {{"retry_after_us", 5}});
  SUBCASE("for blocks") { kit.refuse(kReserveVerb, id, busy); }
  SUBCASE("while it writes") {
    kit.reply(kReserveVerb, id, reserved(SessionKit::peer_addresses(2)));
    kit.refuse(kReserveVerb, id, busy);
    CHECK_FALSE(transfer->done());  // O2
    CHECK(kit.host.writes.at(0).request.cancelled->load());
    const Error stopped(ErrorCode::kCancelled, "stopped");
    kit.host.end_write(&stopped);
    CHECK(kit.link->take().verb == kAbandonVerb.number);
  }
  SUBCASE("of its completion") {
    kit.reply(kReserveVerb, id, reserved(SessionKit::peer_addresses(2)));
    kit.host.end_write();
    kit.refuse(kCompleteVerb, id, busy);
  }
  CHECK(failure(*transfer) == ErrorCode::kBusy);
  CHECK(is_unread(kit, from));
}

TEST_CASE("statistics name the strategy that was used") {
  const auto used = [](Strategy asked, bool streamed) {
    SessionKit kit;
    TransferRequest request = request_for(kit, 1);
    request.strategy = asked;
    request.streamed = streamed;
    return kit.session->transfer(std::move(request))->stats().strategy;
  };
  for (const Strategy strategy :
       {Strategy::kByLayer, Strategy::kByLayerAgg, Strategy::kByRequest, Strategy::kByRequestAgg}) {
    CHECK(used(strategy, false) == strategy_name(strategy));
  }
  CHECK(used(Strategy::kAuto, false) == "by_request_agg");
  for (const Strategy strategy :
       {Strategy::kAuto, Strategy::kByLayerAgg, Strategy::kByRequest, Strategy::kByRequestAgg}) {
    CHECK(used(strategy, true) == "by_layer_agg");
  }
  CHECK(used(Strategy::kByLayer, true) == "by_layer");
}

TEST_CASE("the total is known from the start, and leaves out what the receiver has") {
  SessionKit kit;
  TransferRequest request = request_for(kit, 3);
  request.insert = true;
  request.tokens = prompt(1, 3);
  const auto transfer = kit.session->transfer(std::move(request));
  CHECK(transfer->bytes_total() == kit.bytes_of(3));
  kit.reply_next(kReserveVerb, reserved(SessionKit::peer_addresses(1), 2));
  CHECK(transfer->bytes_total() == kit.bytes_of(1));
}

TEST_CASE("a layer of a failed stream is refused with the reason") {
  SessionKit kit;
  TransferRequest request = request_for(kit, 2);
  request.streamed = true;
  const auto transfer = kit.session->transfer(std::move(request));
  const std::uint64_t id = kit.link->take().id;
  SUBCASE("ended") { kit.refuse(kReserveVerb, id, Error(ErrorCode::kBusy, "later")); }
  SUBCASE("about to end") {
    kit.reply(kReserveVerb, id, reserved(SessionKit::peer_addresses(2)));
    transfer->send_layer(0);
    REQUIRE(kit.host.writes.size() == 1);
    kit.session->stop_writing(Error(ErrorCode::kBusy, "later"));
  }
  CHECK(code_of([&] { transfer->send_layer(0); }) == ErrorCode::kBusy);
}

TEST_CASE("writes that complete at once run in a loop, not in a recursion") {
  constexpr std::size_t kLayers = 4096;
  constexpr std::uintptr_t kStackBytes = 64 << 10;
  SessionKit kit(true, 2, 4, 2 * kLayers);
  kit.host.writes_at_once = true;
  TransferRequest request = request_for(kit, 1);
  SUBCASE("all layers are there") { request.strategy = Strategy::kByLayer; }
  SUBCASE("layer by layer, before the receiver has answered") { request.streamed = true; }
  const bool streamed = request.streamed;
  const auto transfer = kit.session->transfer(std::move(request));
  const std::uint64_t id = kit.link->take().id;
  for (std::uint32_t layer = 0; streamed && layer < kLayers; ++layer) transfer->send_layer(layer);
  if (streamed) transfer->finish();
  kit.reply(kReserveVerb, id, reserved(SessionKit::peer_addresses(1)));
  CHECK(kit.link->take().verb == kCompleteVerb.number);
  kit.reply(kCompleteVerb, id, write_addresses({}));
  CHECK(transfer->done());
  CHECK(transfer->stats().calls == kLayers);
  CHECK(kit.host.stack_high - kit.host.stack_low < kStackBytes);
}

TEST_CASE("a write reports its end once, even if the handler throws") {
  struct Broken final : Route {
    const char* name() const noexcept override { return "broken"; }
    RouteTraits traits() const noexcept override { return {}; }
    double estimate_us(const MediaSet&, const MediaSet&, const WriteSize&, std::int64_t) const noexcept override {
      return 1;
    }
    WriteOutcome write(const WriteRequest&) override {
      if (breaks) throw Error(ErrorCode::kPeerLost, "gone");
      return {1, 2};
    }
    void close() noexcept override {}
    bool breaks = false;
  };
  for (const bool breaks : {false, true}) {
    const auto route = std::make_shared<Broken>();
    route->breaks = breaks;
    int calls = 0;
    WriteJob job;
    job.route = route;
    job.done = [&](const WriteOutcome& outcome, const Error* error) {
      ++calls;
      CHECK(outcome.bytes == (breaks ? 0 : 2));
      CHECK((error != nullptr) == breaks);
      throw Error(ErrorCode::kOutOfMemory, "what comes of it fails");
    };
    CHECK(code_of([&] { carry_out(job); }) == ErrorCode::kOutOfMemory);
    CHECK(calls == 1);
  }
}

TEST_CASE("a route is chosen by the pieces that the strategy makes, each to be a call or not") {
  SessionKit kit;  // two pieces a block
  kit.session->start(kit.link, {kit.route, std::make_shared<ScriptRoute>(true)});
  const auto chosen_by = [&](Strategy strategy) {
    TransferRequest request = request_for(kit, 3);
    request.strategy = strategy;
    kit.session->transfer(std::move(request));
    return kit.route->estimated;
  };
  for (const Strategy strategy : {Strategy::kByRequest, Strategy::kByLayer}) {
    CHECK(chosen_by(strategy).pieces == 6);
    CHECK_FALSE(kit.route->estimated.gather);
  }
  for (const Strategy strategy : {Strategy::kAuto, Strategy::kByRequestAgg, Strategy::kByLayerAgg}) {
    CHECK(chosen_by(strategy).pieces == (kit.pool->layout().aggregated ? 3 : 6));
    CHECK(kit.route->estimated.gather);
    CHECK(kit.route->estimated.bytes == 3 * kit.pool->layout().block_bytes());
  }
}

TEST_CASE("a route is asked whether it is ready without the session's lock") {
  SessionKit kit;
  std::thread other;
  bool is_free = false;
  kit.route->when_asked = [&] {
    const auto seen = std::make_shared<std::atomic<bool>>(false);
    other = std::thread([&, seen] {
      static_cast<void>(kit.session->route_names());
      *seen = true;
    });
    is_free = soon([&] { return seen->load(); });
  };
  kit.session->transfer(request_for(kit, 1));
  REQUIRE(other.joinable());
  other.join();
  CHECK(is_free);
}

TEST_CASE("a route that does not reach the destinations is not chosen") {
  SessionKit kit;
  kit.route->reaches_dram = false;
  TransferRequest request = request_for(kit, 1);
  request.medium = kMixed;
  CHECK(code_of([&] { kit.session->transfer(std::move(request)); }) == ErrorCode::kUnsupported);
}

}  // namespace
}  // namespace kvpool::testing
