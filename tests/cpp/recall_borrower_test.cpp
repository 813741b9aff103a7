// A borrower whose blocks are recalled by an owner that follows a script.
#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "session_kit.h"

namespace kvpool::testing {
namespace {

constexpr std::uint64_t kLoan = 50;

// A borrower of two blocks, which are recalled for 100 ms.
struct Borrower : SessionKit {
  explicit Borrower(bool one_sided = true) : SessionKit(one_sided), borrowed(borrow(2)) {
    ask(kRecallVerb, kLoan, write_addresses(borrowed), 100);
  }
  std::shared_ptr<Transfer> write(const Addresses& to, bool told = false, bool streamed = false) {
    TransferRequest request;
    request.peer = "peer";
    request.from = alloc(*pool, to.size());
    request.to = to;
    request.streamed = streamed;
    if (told) request.private_bytes = Bytes(3);
    request.deadline_ns = host.now + 1000 * kMs;
    return session->transfer(std::move(request));
  }
  std::optional<ErrorCode> give_back(const Addresses& addresses) {
    link->meanwhile = [this](std::int64_t) { reply(kReturnVerb, link->sent.back().id); };
    const auto code = code_of([&] { session->give_back(addresses, host.now + kMs); });
    link->meanwhile = nullptr;
    return code;
  }
  bool answered() const {
    return std::ranges::any_of(link->sent, [](const Message& one) {
      return one.kind == FrameKind::kAnswer && one.id == kLoan && one.verb == kRecallVerb.number;
    });
  }
  Addresses borrowed;
};

TEST_CASE("the application is told of a recall, and the owner is answered after the last block") {
  Borrower kit;
  REQUIRE(kit.host.recalls.size() == 1);
  CHECK(kit.host.recalls[0].first == kit.borrowed);
  CHECK(kit.host.recalls[0].second == kit.host.now + 100 * kMs);
  CHECK(kit.host.tick_at == kit.host.now + 100 * kMs);
  CHECK(kit.link->sent.empty());
  CHECK(kit.give_back({kit.borrowed[0]}) == std::nullopt);
  CHECK_FALSE(kit.answered());
  kit.link->sent.clear();
  kit.link->meanwhile = [&](std::int64_t) { kit.reply(kReturnVerb, kit.link->sent.front().id); };
  kit.session->give_back({&kit.borrowed[1], 1}, kit.host.now + kMs);
  REQUIRE(kit.link->sent.size() == 2);
  CHECK(kit.link->sent[0].verb == kReturnVerb.number);
  CHECK(kit.answered());
}

TEST_CASE("a recalled loan is over for all purposes at the deadline, or when the owner says so") {
  Borrower kit;
  SUBCASE("the deadline") {
    CHECK(kit.session->tick(kit.host.now + 99 * kMs) == kit.host.now + 100 * kMs);
    CHECK_FALSE(kit.answered());
    kit.session->tick(kit.host.now += 100 * kMs);
  }
  SUBCASE("the owner") { kit.cancel(kRecallVerb, kLoan); }
  CHECK(kit.answered());
  CHECK(kit.session->borrowed_blocks() == 0);
  CHECK(kit.give_back({kit.borrowed[0]}) == ErrorCode::kStaleAddress);
  CHECK(code_of([&] { kit.write(kit.borrowed); }) == ErrorCode::kStaleAddress);
  // Another loan of the same blocks is another loan.
  const Addresses again = {kit.borrowed[0] + (Address{1} << kGenerationShift)};
  kit.link->sent.clear();
  kit.link->meanwhile = [&](std::int64_t) { kit.reply_next(kLendVerb, write_addresses(again)); };
  CHECK(kit.session->borrow(1, Medium::kHbm, true, kit.host.now + kMs) == again);
  CHECK(kit.session->borrowed_blocks() == 1);
  CHECK(code_of([&] { kit.write({kit.borrowed[0]}); }) == ErrorCode::kStaleAddress);
  CHECK(kit.give_back(again) == std::nullopt);
}

TEST_CASE("a transfer that writes recalled blocks at the deadline is stopped, and the owner is told when it ended") {
  for (const bool told : {false, true}) {
    Borrower kit;
    const auto transfer = kit.write({kit.borrowed[0]}, told);
    REQUIRE(kit.host.writes.size() == 1);
    kit.session->tick(kit.host.now += 100 * kMs);
    CHECK(kit.host.writes[0].request.cancelled->load());
    CHECK_FALSE(kit.answered());
    CHECK_FALSE(transfer->done());
    const Error stopped(ErrorCode::kCancelled, "stopped");
    kit.host.end_write(&stopped);
    CHECK(kit.answered());
    CHECK(failure(*transfer) == ErrorCode::kStaleAddress);
  }
}

TEST_CASE("a recall ends a transfer that waits for its next layer, and leaves one to other blocks alone") {
  Borrower kit;
  const Addresses other = kit.borrow(1, 5);
  const auto streamed = kit.write({kit.borrowed[0]}, true, /*streamed=*/true);
  const auto others = kit.write(other, true, /*streamed=*/true);
  kit.session->tick(kit.host.now += 100 * kMs);
  CHECK(kit.answered());
  CHECK(failure(*streamed) == ErrorCode::kStaleAddress);
  CHECK_FALSE(others->done());
}

TEST_CASE("a transfer that has announced its completion gets its answer first") {
  Borrower kit;
  const auto transfer = kit.write({kit.borrowed[0]}, true);
  kit.host.end_write();
  const std::uint64_t id = kit.take(kCompleteVerb).id;
  kit.session->tick(kit.host.now += 100 * kMs);
  CHECK_FALSE(kit.answered());
  SUBCASE("done") {
    kit.reply(kCompleteVerb, id, write_addresses({}));
    CHECK_NOTHROW(transfer->rethrow_if_failed());
  }
  SUBCASE("too late") {
    kit.refuse(kCompleteVerb, id, Error(ErrorCode::kNotOwner, "not lent to you"));
    CHECK(failure(*transfer) == ErrorCode::kNotOwner);
  }
  CHECK(kit.answered());
}

TEST_CASE("a recall of returned blocks is answered at once, and one of blocks never borrowed ends the link") {
  SessionKit kit;
  const Addresses borrowed = kit.borrow(1);
  kit.ask(kRecallVerb, kLoan, write_addresses(SessionKit::peer_addresses(2, 3)), 100);
  CHECK(kit.answer().kind == FrameKind::kAnswer);
  CHECK(kit.host.recalls.empty());
  CHECK(code_of([&] {
          kit.ask(kRecallVerb, kLoan, write_addresses({{borrowed[0], make_address(1, Medium::kHbm, 1, 1)}}), 100);
        }) == ErrorCode::kProtocol);
}

TEST_CASE("blocks that are being returned at the deadline are not borrowed again, even if the return cannot be sent") {
  Borrower kit;
  kit.link->busy = true;
  kit.session->borrowed().begin_write(kit.borrowed);
  SUBCASE("before") { kit.session->tick(kit.host.now += 100 * kMs); }
  SUBCASE("never") {}
  CHECK(code_of([&] { kit.session->give_back_marked(kit.borrowed, kit.host.now + kMs); }) == ErrorCode::kBusy);
  kit.link->busy = false;
  kit.session->tick(kit.host.now += 100 * kMs);
  CHECK(kit.session->borrowed_blocks() == 0);
  CHECK(kit.give_back(kit.borrowed) == ErrorCode::kStaleAddress);
}

}  // namespace
}  // namespace kvpool::testing
