// An owner that recalls lent blocks from a borrower that follows a script.
#include <doctest/doctest.h>

#include <optional>

#include "session_kit.h"

namespace kvpool::testing {
namespace {

constexpr std::uint64_t kLoan = 50;

bool same(const RecallResult& result, std::uint32_t returned, std::uint32_t freed, std::uint32_t quarantined) {
  return result.returned == returned && result.freed == freed && result.quarantined == quarantined;
}

// An owner with a call that ends when the script says so.
struct Owner : SessionKit {
  explicit Owner(bool one_sided = true) : SessionKit(one_sided) {}
  // `borrower`: its reaction to the call. Then time passes to the deadline.
  RecallResult recall(const Addresses& addresses, const std::function<void(std::uint64_t id)>& borrower = {}) {
    std::optional<std::uint64_t> asked;
    link->meanwhile = [&, this](std::int64_t until_ns) {
      if (!asked) {
        const Message call = take(kRecallVerb);
        CHECK(read_addresses(call.body) == addresses);
        asked = id = call.id;
        if (borrower) borrower(id);
      } else {
        host.now = until_ns;
      }
    };
    const RecallResult result = session->recall(addresses, host.now + 100 * kMs);
    link->meanwhile = nullptr;
    return result;
  }
  void give_back(const Addresses& addresses) {
    ask(kReturnVerb, 900, write_addresses(addresses));
    CHECK(answer().kind == FrameKind::kAnswer);
  }
  std::uint64_t id = 0;  // of the last recall
};

TEST_CASE("blocks that are returned when they are recalled end the recall at once") {
  Owner kit;
  const Addresses lent = kit.lend(kLoan, 3);
  const std::int64_t before = kit.host.now;
  const RecallResult result = kit.recall(lent, [&](std::uint64_t id) {
    kit.give_back(lent);
    kit.reply(kRecallVerb, id);
  });
  CHECK(same(result, 3, 0, 0));
  CHECK(kit.host.now == before);
  CHECK(kit.count(BlockState::kFree) == 16);
  CHECK(kit.session->counts().promised == 0);
}

TEST_CASE("blocks that the peer writes by itself are quarantined at the deadline, until it has stopped writing") {
  Owner kit;
  const Addresses lent = kit.lend(kLoan, 3);
  const RecallResult result = kit.recall(lent, [&](std::uint64_t) { kit.give_back({lent[1]}); });
  CHECK(same(result, 1, 0, 2));
  CHECK(kit.count(BlockState::kQuarantined) == 2);
  CHECK(kit.session->counts().lent == 0);
  const Message cancel = kit.link->take();
  CHECK(cancel.kind == FrameKind::kCancel);
  CHECK(cancel.verb == kRecallVerb.number);
  CHECK(cancel.id == kit.id);
  SUBCASE("it says so") { kit.reply(kRecallVerb, kit.id); }
  SUBCASE("it is proved to be gone") { kit.session->on_writer_gone(); }
  SUBCASE("it is lost, and proved to be gone then") {
    kit.session->on_closed(Error(ErrorCode::kPeerLost, "killed"));
    CHECK(kit.count(BlockState::kQuarantined) == 2);
    kit.session->on_writer_gone();
  }
  SUBCASE("it says something else, and then so") {
    kit.refuse(kRecallVerb, kit.id, Error(ErrorCode::kBusy, "later"));
    kit.ask(kAbandonVerb, kit.id);
    kit.ask(kAbandonVerb, kit.id | kRecallBit);
    kit.link->sent.clear();
    CHECK(kit.count(BlockState::kQuarantined) == 2);
    kit.reply(kRecallVerb, kit.id);
  }
  CHECK(kit.count(BlockState::kFree) == 16);
  CHECK(kit.session->counts().promised == 0);
}

TEST_CASE("blocks that this process writes are free at the deadline, and every late use of them is refused") {
  Owner kit(/*one_sided=*/false);
  const Addresses lent = kit.lend(kLoan, 2);
  CHECK(same(kit.recall(lent), 0, 2, 0));
  kit.link->sent.clear();
  CHECK(kit.count(BlockState::kFree) == 16);
  CHECK(kit.session->counts().promised == 0);
  CHECK_FALSE(kit.place(7, lent));
  CompleteBody body = kit.completion(2);
  body.named = lent;
  kit.ask(kCompleteVerb, 7, write_body(body));
  CHECK(kit.refusal() == ErrorCode::kNotOwner);
  kit.ask(kReturnVerb, 8, write_addresses(lent));
  CHECK(kit.refusal() == ErrorCode::kNotOwner);
  kit.ask(kFetchVerb, kFetchBit | 9, write_body(FetchBody{Priority::kPrefill, lent, SessionKit::peer_addresses(2)}),
          50);
  CHECK(kit.refusal() == ErrorCode::kStaleAddress);
  kit.reply(kRecallVerb, kit.id);  // changes nothing any more
  CHECK(kit.count(BlockState::kFree) == 16);
}

TEST_CASE("a return that crosses the end of a recall is refused, but gives the other blocks back") {
  Owner kit(/*one_sided=*/false);
  const Addresses lent = kit.lend(kLoan, 3);
  CHECK(same(kit.recall({lent[1]}), 0, 1, 0));
  kit.link->sent.clear();
  kit.ask(kReturnVerb, 8, write_addresses(lent));
  CHECK(kit.refusal() == ErrorCode::kNotOwner);
  CHECK(kit.session->counts().lent == 0);
  CHECK(kit.session->counts().promised == 0);
  CHECK(kit.count(BlockState::kFree) == 16);
}

TEST_CASE("blocks that are being written at the deadline are freed after that, and others at once") {
  Owner kit(/*one_sided=*/false);
  const Addresses lent = kit.lend(kLoan, 2);
  const Placement placement = kit.data(7, {lent[0]});
  REQUIRE(!placement.pieces.empty());
  SUBCASE("others") {
    CHECK(same(kit.recall({lent[1]}), 0, 1, 0));
    kit.link->sent.clear();
    kit.session->on_placed(placement.token, true);
    CHECK(kit.count(BlockState::kLent) == 1);
    return;
  }
  CHECK(same(kit.recall(lent), 0, 0, 2));
  CHECK(kit.count(BlockState::kQuarantined) == 2);
  kit.reply(kRecallVerb, kit.id);
  CHECK(kit.count(BlockState::kQuarantined) == 2);
  CHECK_FALSE(kit.place(8, {lent[1]}));
  SUBCASE("it arrives") { kit.session->on_placed(placement.token, true); }
  SUBCASE("the link ends") {
    kit.session->on_placed(placement.token, false);
    kit.session->on_closed(Error(ErrorCode::kPeerLost, "killed"));
  }
  CHECK(kit.count(BlockState::kFree) == 16);
  CHECK(kit.session->counts().promised == 0);
}

// As by a pass that is announced behind the return, and admitted before the return is handled.
TEST_CASE("a block that is returned while content is being written to it is freed after that") {
  Owner kit(/*one_sided=*/false);
  const Addresses lent = kit.lend(kLoan, 3);
  const Placement first = kit.data(7, {lent[0]});
  const Placement second = kit.data(8, {lent[0], lent[1]});
  REQUIRE(!second.pieces.empty());
  kit.give_back(lent);
  CHECK(kit.session->counts().lent == 0);
  CHECK(kit.count(BlockState::kQuarantined) == 3);
  CHECK(kit.session->counts().promised == 3);
  CHECK_FALSE(kit.place(9, {lent[2]}));
  SUBCASE("in order") {
    kit.session->on_placed(first.token, true);
    CHECK(kit.count(BlockState::kQuarantined) == 3);
    kit.session->on_placed(second.token, true);
  }
  SUBCASE("the other way round, whatever else is returned meanwhile") {
    const Addresses more = kit.lend(kLoan + 1, 1);
    const Placement third = kit.data(9, more);
    kit.give_back(more);
    kit.session->on_placed(second.token, true);
    kit.session->on_placed(third.token, true);
    CHECK(kit.count(BlockState::kQuarantined) == 3);
    kit.session->on_placed(first.token, false);
  }
  CHECK(kit.count(BlockState::kFree) == 16);
  CHECK(kit.session->counts().promised == 0);
}

TEST_CASE("a return that is refused while content is being written has changed nothing") {
  Owner kit(/*one_sided=*/false);
  const Addresses lent = kit.lend(kLoan, 2);
  const Placement placement = kit.data(7, {lent[0]});
  kit.ask(kReturnVerb, 900, write_addresses(Addresses{lent[0], lent[0]}));
  CHECK(kit.refusal() == ErrorCode::kNotOwner);
  kit.session->on_placed(placement.token, true);
  CHECK(kit.count(BlockState::kLent) == 2);
  CHECK(kit.session->counts().promised == 2);
}

TEST_CASE("a proof that the writer is gone frees no block to which this process still writes") {
  Owner kit;
  const Addresses lent = kit.lend(kLoan, 2);
  const Placement placement = kit.data(7, {lent[0]});
  REQUIRE(!placement.pieces.empty());
  CHECK(same(kit.recall(lent), 0, 0, 2));
  SUBCASE("the proof") { kit.session->on_writer_gone(); }
  SUBCASE("its word") { kit.reply(kRecallVerb, kit.id); }
  CHECK(kit.count(BlockState::kQuarantined) == 2);
  kit.session->on_placed(placement.token, true);
  CHECK(kit.count(BlockState::kFree) == 16);
  CHECK(kit.session->counts().promised == 0);
}

TEST_CASE("an answer that comes while a recall's deadline is handled frees the blocks") {
  Owner kit;
  const Addresses lent = kit.lend(kLoan, 2);
  // The cancellation goes out before the blocks are taken back, and the peer answers at once.
  const RecallResult result =
      kit.recall(lent, [&](std::uint64_t id) { kit.link->at_once = [&kit, id] { kit.reply(kRecallVerb, id); }; });
  CHECK(same(result, 0, 2, 0));
  CHECK(kit.count(BlockState::kFree) == 16);
  CHECK(kit.session->counts().promised == 0);
}

TEST_CASE("a peer that has said that it no longer writes recalled blocks loses all of them") {
  Owner kit;
  const Addresses lent = kit.lend(kLoan, 2);
  CHECK(same(kit.recall(lent, [&](std::uint64_t id) { kit.reply(kRecallVerb, id); }), 0, 2, 0));
  CHECK(kit.count(BlockState::kFree) == 16);
}

TEST_CASE("a recall that cannot be sent, or names a block twice or one that is not lent, has changed nothing") {
  Owner kit;
  const Addresses lent = kit.lend(kLoan, 2);
  const auto recall = [&](const Addresses& addresses) {
    return code_of([&] { kit.session->recall(addresses, kit.host.now + kMs); });
  };
  const Addresses own = alloc(*kit.pool, 1);
  CHECK(recall({lent[0], own[0]}) == ErrorCode::kNotOwner);
  CHECK(recall({lent[0], lent[0]}) == ErrorCode::kArgument);
  kit.link->busy = true;
  CHECK(recall(lent) == ErrorCode::kBusy);
  kit.link->busy = false;
  CHECK(kit.link->sent.empty());
  CHECK(recall({}) == std::nullopt);
  CHECK(kit.session->under_way() == 0);
  CHECK(kit.count(BlockState::kLent) == 2);
  kit.pool->free(own.data(), own.size());
}

TEST_CASE("a recall reports that the peer refused it, or that the link ended") {
  Owner kit;
  const Addresses lent = kit.lend(kLoan, 2);
  SUBCASE("refused") {
    CHECK(code_of([&] {
            kit.recall(lent, [&](std::uint64_t id) { kit.refuse(kRecallVerb, id, Error(ErrorCode::kBusy, "later")); });
          }) == ErrorCode::kBusy);
    CHECK(kit.count(BlockState::kLent) == 2);
  }
  SUBCASE("lost") {
    CHECK(code_of([&] {
            kit.recall(lent, [&](std::uint64_t) { kit.session->on_closed(Error(ErrorCode::kPeerLost, "killed")); });
          }) == ErrorCode::kPeerLost);
    CHECK(kit.count(BlockState::kQuarantined) == 2);
    CHECK(code_of([&] { kit.session->recall(lent, kit.host.now + kMs); }) == ErrorCode::kPeerLost);
  }
}

TEST_CASE("some of the lent blocks can be recalled by number, and no more than there are") {
  Owner kit;
  const Addresses lent = kit.lend(kLoan, 3);
  std::size_t asked = 0;
  kit.link->meanwhile = [&](std::int64_t) {
    const Message call = kit.take(kRecallVerb);
    asked = read_addresses(call.body).size();
    kit.reply(kRecallVerb, call.id);
  };
  CHECK(same(kit.session->recall_some(2, kit.host.now + kMs), 0, 2, 0));
  CHECK(asked == 2);
  CHECK(same(kit.session->recall_some(9, kit.host.now + kMs), 0, 1, 0));
  CHECK(same(kit.session->recall_some(9, kit.host.now + kMs), 0, 0, 0));
}

TEST_CASE("a caller may give up waiting for a recall, which still ends at its deadline") {
  Owner kit(/*one_sided=*/false);
  const Addresses lent = kit.lend(kLoan, 2);
  const Waiting waiting(kit.host.now + 1000 * kMs, [] { return true; });
  CHECK(code_of([&] { kit.session->recall(lent, waiting); }) == ErrorCode::kCancelled);
  CHECK(kit.count(BlockState::kLent) == 2);
  kit.session->tick(kit.host.now += 1000 * kMs);
  CHECK(kit.count(BlockState::kFree) == 16);
}

TEST_CASE("blocks that are being inserted at the deadline belong to the index, or are free if that fails") {
  Owner kit(/*one_sided=*/false);
  const Addresses lent = kit.lend(kLoan, 1);
  CHECK(kit.place(7, lent));
  CompleteBody body = kit.completion(1);
  body.named = lent;
  body.has_private = false;
  body.private_bytes.clear();
  body.insert = body.has_checksum = true;
  body.tokens = prompt(1, 1);
  body.checksum = kit.peer_blocks.checksum(lent);
  bool inserts = false;
  SUBCASE("intact") { inserts = true; }
  SUBCASE("damaged") { ++body.checksum; }
  kit.ask(kCompleteVerb, 7, write_body(body));
  CHECK(same(kit.recall(lent), 1, 0, 0));
  kit.link->sent.clear();
  kit.host.run_works();
  CHECK((kit.answer().kind == FrameKind::kAnswer) == inserts);
  CHECK(kit.count(BlockState::kHistorical) == (inserts ? 1 : 0));
  CHECK(kit.count(BlockState::kLent) == 0);
  CHECK(kit.session->counts().promised == 0);
}

}  // namespace
}  // namespace kvpool::testing
