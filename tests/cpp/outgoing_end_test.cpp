// How a transfer ends early, against a peer that follows a script: by its deadline, a cancellation or a loss.
#include <doctest/doctest.h>

#include "failing_alloc.h"
#include "outgoing_kit.h"
#include "silent_link.h"
#include "thrown.h"

namespace kvpool::testing {
namespace {

using outgoing::is_unread;
using outgoing::request_for;
using outgoing::reserved;

TEST_CASE("the deadline ends a transfer in each phase, and waits only for a write under way") {
  SessionKit kit;
  TransferRequest request = request_for(kit, 2);
  request.streamed = true;
  const Addresses from = request.from;
  const auto transfer = kit.session->transfer(std::move(request));
  const std::uint64_t id = kit.link->take().id;
  const auto late = [&] { kit.session->tick(kit.host.now += 101 * kMs); };
  SUBCASE("reserving") { late(); }
  SUBCASE("streaming") {
    kit.reply(kReserveVerb, id, reserved(SessionKit::peer_addresses(2)));
    late();
  }
  SUBCASE("writing") {
    kit.reply(kReserveVerb, id, reserved(SessionKit::peer_addresses(2)));
    transfer->send_layer(0);
    late();
    CHECK_FALSE(transfer->done());
    CHECK(kit.link->sent.empty());
    kit.pool->free(from.data(), from.size());
    CHECK(kit.count(BlockState::kFree) == 14);  // O1: they are still read
    kit.host.end_write();
    CHECK(kit.count(BlockState::kFree) == 16);
  }
  SUBCASE("completing") {
    kit.reply(kReserveVerb, id, reserved(SessionKit::peer_addresses(2)));
    transfer->send_layer(0);
    kit.host.end_write();
    transfer->finish();
    CHECK(kit.link->take().verb == kCompleteVerb.number);
    late();
  }
  SUBCASE("cancelling") {
    CHECK(transfer->cancel());
    CHECK(kit.link->take().verb == kAbandonVerb.number);
    CHECK_FALSE(transfer->done());
    late();
    CHECK(failure(*transfer) == ErrorCode::kCancelled);
    return;
  }
  CHECK(failure(*transfer) == ErrorCode::kDeadline);
  CHECK(kit.link->take().verb == kAbandonVerb.number);
}

// As when the deadline is so near that another thread finds it over before the request has been sent.
TEST_CASE("the message that gives up a transfer is sent after the transfer's request") {
  struct LateLink final : SilentLink {
    void send(Message&& message) override {
      if (const auto first = std::exchange(before, nullptr)) first();
      sent.push_back(message.verb);
    }
    std::function<void()> before;
    std::vector<std::uint16_t> sent;
  };
  SessionKit kit;
  const auto link = std::make_shared<LateLink>();
  const auto session = std::make_shared<Session>(kit.host, kit.session->peer(), true);
  session->start(link, {kit.route});
  TransferRequest request = request_for(kit, 2);
  const Addresses from = request.from;
  link->before = [&] { session->tick(kit.host.now += 101 * kMs); };
  const auto transfer = session->transfer(std::move(request));
  CHECK(failure(*transfer) == ErrorCode::kDeadline);
  CHECK(link->sent == std::vector{kAbandonVerb.number, kReserveVerb.number, kAbandonVerb.number});
  CHECK(is_unread(kit, from));
  session->on_closed(Error(ErrorCode::kPeerLost, "the test ends"));
}

TEST_CASE("a cancelled transfer is done once both sides know") {
  SessionKit kit;
  TransferRequest request = request_for(kit, 2);
  const Addresses from = request.from;
  const auto transfer = kit.session->transfer(std::move(request));
  const std::uint64_t id = kit.link->take().id;
  SUBCASE("before it has blocks") { CHECK(transfer->cancel()); }
  SUBCASE("while it writes") {
    kit.reply(kReserveVerb, id, reserved(SessionKit::peer_addresses(2)));
    CHECK(transfer->cancel());
    CHECK(kit.link->sent.empty());
    const Error stopped(ErrorCode::kCancelled, "stopped");
    kit.host.end_write(&stopped);
  }
  CHECK(kit.link->take().verb == kAbandonVerb.number);
  CHECK_FALSE(transfer->done());
  CHECK(is_unread(kit, from));  // though the peer may take long to answer
  CHECK(transfer->cancel());    // it is being cancelled
  CHECK(kit.link->sent.empty());
  kit.reply(kReserveVerb, id, reserved(SessionKit::peer_addresses(2)));  // had been said before
  kit.reply(kAbandonVerb, id);
  CHECK(failure(*transfer) == ErrorCode::kCancelled);
  CHECK_FALSE(transfer->cancel());
}

TEST_CASE("a transfer that ends in another way is not cancelled, and says so") {
  SessionKit kit;
  const auto transfer = kit.session->transfer(request_for(kit, 1));
  const std::uint64_t id = kit.link->take().id;
  kit.reply(kReserveVerb, id, reserved(SessionKit::peer_addresses(1)));
  SUBCASE("the receiver knows that all is written") {
    kit.host.end_write();
    CHECK(kit.link->take().verb == kCompleteVerb.number);
    CHECK_FALSE(transfer->cancel());
    CHECK(kit.link->sent.empty());
    kit.reply(kCompleteVerb, id, write_addresses({}));
    CHECK_NOTHROW(transfer->rethrow_if_failed());
  }
  SUBCASE("it has failed in its write") {
    kit.session->stop_writing(Error(ErrorCode::kBusy, "later"));
    CHECK_FALSE(transfer->cancel());
    kit.host.end_write();
    CHECK(failure(*transfer) == ErrorCode::kBusy);
  }
}

TEST_CASE("a cancellation that cannot be sent ends the link, so the receiver does not wait forever") {
  SessionKit kit;
  const auto transfer = kit.session->transfer(request_for(kit, 1));
  kit.link->busy = true;
  CHECK(transfer->cancel());
  CHECK(kit.link->closed);
  kit.session->on_closed(Error(ErrorCode::kBusy, "too much is queued"));
  CHECK(failure(*transfer) == ErrorCode::kCancelled);
}

TEST_CASE("a lost link ends everything, and is drained after its last write") {
  SessionKit kit;
  const auto one = kit.session->transfer(request_for(kit, 1));
  kit.reply_next(kReserveVerb, reserved(SessionKit::peer_addresses(1)));
  const auto other = kit.session->transfer(request_for(kit, 1));
  kit.reply_next(kReserveVerb, reserved(SessionKit::peer_addresses(1, 1)));
  const auto waiting = kit.session->transfer(request_for(kit, 1));
  kit.session->on_closed(Error(ErrorCode::kPeerLost, "gone"));
  kit.link->closed = true;
  CHECK(kit.route->closed);
  CHECK(failure(*waiting) == ErrorCode::kPeerLost);
  CHECK_FALSE(one->done());
  kit.host.end_write();
  CHECK(kit.host.drained_calls == 0);  // the other still writes
  kit.host.end_write();
  CHECK(kit.host.drained_calls == 1);
  CHECK(failure(*one) == ErrorCode::kPeerLost);
  CHECK(failure(*other) == ErrorCode::kPeerLost);
  CHECK(code_of([&] { kit.session->transfer(request_for(kit, 1)); }) == ErrorCode::kPeerLost);
}

TEST_CASE("a write whose GPU or peer is lost ends the link without telling the peer that writes have ended") {
  for (const ErrorCode code : {ErrorCode::kDeviceLost, ErrorCode::kPeerLost}) {
    for (const bool cancelled : {false, true}) {
      CAPTURE(static_cast<int>(code));
      CAPTURE(cancelled);
      SessionKit kit;
      TransferRequest request = request_for(kit, 1);
      const Addresses from = request.from;
      const auto transfer = kit.session->transfer(std::move(request));
      kit.reply_next(kReserveVerb, reserved(SessionKit::peer_addresses(1)));
      if (cancelled) CHECK(transfer->cancel());
      const Error lost(code, "gone");
      kit.host.end_write(&lost);
      CHECK(kit.link->closed);
      CHECK(kit.link->sent.empty());
      CHECK(failure(*transfer) == (cancelled ? ErrorCode::kCancelled : code));
      kit.session->say_drained();
      kit.session->on_closed(lost);
      CHECK(kit.link->sent.empty());
      CHECK(is_unread(kit, from));
    }
  }
}

TEST_CASE("losing the GPU in a write during a parting does not tell the peer that writes have ended") {
  for (const ErrorCode code : {ErrorCode::kDeviceLost, ErrorCode::kPeerLost}) {
    CAPTURE(static_cast<int>(code));
    SessionKit kit;
    const auto transfer = kit.session->transfer(request_for(kit, 1));
    kit.reply_next(kReserveVerb, reserved(SessionKit::peer_addresses(1)));
    kit.session->stop_writing(Error(ErrorCode::kPeerLost, "closed here"));
    const Error lost(code, "gone");  // a route that was closed for it says that its peer is lost, and has ended
    kit.host.end_write(&lost);
    kit.link->sent.clear();
    kit.session->say_drained();
    CHECK(kit.link->sent.size() == (code == ErrorCode::kDeviceLost ? 0 : 1));
  }
}

TEST_CASE("a handle keeps alive neither the link nor the routes of a lost peer") {
  SessionKit kit;
  const auto writing = kit.session->transfer(request_for(kit, 2));
  kit.reply_next(kReserveVerb, reserved(SessionKit::peer_addresses(2)));
  const auto waiting = kit.session->transfer(request_for(kit, 2));
  FetchRequest question;
  question.peer = "peer";
  question.from = SessionKit::peer_addresses(2);
  question.to = alloc(*kit.pool, 2);
  question.deadline_ns = kit.host.now + 100 * kMs;
  const auto fetch = kit.session->fetch(question, /*frees_on_failure=*/false);
  const std::weak_ptr<Link> link = kit.link;
  const std::weak_ptr<Route> route = kit.route;
  kit.link.reset();
  kit.route.reset();
  kit.session->on_closed(Error(ErrorCode::kPeerLost, "the peer has ended"));
  CHECK_FALSE(link.expired());  // a write is under way
  const Error stopped(ErrorCode::kPeerLost, "closed");
  kit.host.end_write(&stopped);
  CHECK(link.expired());
  CHECK(route.expired());
  for (const auto& handle : {writing, waiting, fetch}) {
    CHECK(failure(*handle) == ErrorCode::kPeerLost);
    CHECK(handle->wait(kit.host.now));
    CHECK_FALSE(handle->cancel());
  }
  CHECK(writing->stats().route == "script");
  CHECK(waiting->stats().blocks == 2);
  CHECK(code_of([&] { static_cast<void>(kit.session->transfer(request_for(kit, 1))); }) == ErrorCode::kPeerLost);
  CHECK(code_of([&] { kit.session->give_back({}, kit.host.now); }) == ErrorCode::kPeerLost);
}

TEST_CASE("a finished handle keeps no route alive") {
  SessionKit kit;
  const auto transfer = kit.session->transfer(request_for(kit, 2));
  kit.refuse(kReserveVerb, kit.take(kReserveVerb).id, Error(ErrorCode::kBusy, "later"));
  CHECK(failure(*transfer) == ErrorCode::kBusy);
  CHECK(kit.route.use_count() == 2);  // the test's and the session's
}

TEST_CASE("running out of memory while a transfer begins changes nothing") {
  const int threw = fail_each_allocation([&](auto&& fail) {
    SessionKit kit;
    kit.link->sent.reserve(8);
    TransferRequest request = request_for(kit, 2);
    const Addresses from = request.from;
    std::shared_ptr<Transfer> transfer;
    if (!fail([&] { transfer = kit.session->transfer(std::move(request)); })) return;
    CHECK(kit.session->tick(kit.host.now + 1000 * kMs) == INT64_MAX);
    CHECK(is_unread(kit, from));
  });
  CHECK(threw > 3);
}

}  // namespace
}  // namespace kvpool::testing
