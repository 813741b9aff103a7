// Fetches of prompts into the index, against a peer that follows a script.
#include "kvpool/transfer/prompt_fetch.h"

#include <doctest/doctest.h>

#include <algorithm>

#include "failing_alloc.h"
#include "session_kit.h"

namespace kvpool::testing {
namespace {

constexpr std::size_t kPages = 4;

struct Fetching {
  explicit Fetching(SessionKit& of, std::size_t pages = kPages, bool may_evict = true) : kit(of) {
    PromptFetchRequest request;
    request.peer = "peer";
    request.tokens = prompt(1, pages);
    request.may_evict = may_evict;
    request.deadline_ns = kit.host.now + 100 * kMs;
    handle = kit.session->fetch_prompt(std::move(request));
  }
  // The peer answers the match, with what it has cached.
  void found(std::size_t pages) {
    match_id = kit.take(kMatchVerb).id;
    kit.reply(kMatchVerb, match_id, write_body(MatchedBody{1000, SessionKit::peer_addresses(pages)}));
  }
  // What this side has asked for then, behind which it lets go of the match.
  FetchBody asked() {
    KVPOOL_CHECK(kit.link->sent.size() == 2);
    const Message call = kit.link->sent[0];
    KVPOOL_CHECK(call.verb == kFetchVerb.number);
    KVPOOL_CHECK(kit.link->sent[1].verb == kUnmatchVerb.number && kit.link->sent[1].id == match_id);
    kit.link->sent.clear();
    id = call.id;
    return read_fetch(call.body);
  }
  bool lets_go() {
    const bool does = kit.link->sent.size() == 1 && kit.link->sent[0].verb == kUnmatchVerb.number;
    kit.link->sent.clear();
    return does;
  }

  SessionKit& kit;
  std::shared_ptr<Transfer> handle;
  std::uint64_t match_id = 0;
  std::uint64_t id = 0;
};

std::size_t pages_cached(SessionKit& kit) { return match(kit.pool, prompt(1, kPages)).hit.pages; }

// Nothing is pinned, reserved or lost.
void check_nothing_left(SessionKit& kit) {
  kit.pool->evict(100, kMixed);
  CHECK(kit.count(BlockState::kFree) == 16);
}

TEST_CASE("what the peer has and this pool has not is fetched, and is in the index when it has arrived") {
  SessionKit kit;
  static_cast<void>(insert(kit.pool, prompt(1, 1), alloc(*kit.pool, 1)));
  Fetching fetching(kit);
  fetching.found(3);
  const FetchBody body = fetching.asked();
  const Addresses there = SessionKit::peer_addresses(3);
  CHECK(body.from == Addresses(there.begin() + 1, there.end()));
  CHECK(kit.count(BlockState::kReserved) == 2);
  CHECK(pages_cached(kit) == 1);
  CHECK_FALSE(fetching.handle->done());
  kit.reply(kFetchVerb, fetching.id, fetched());
  CHECK_NOTHROW(fetching.handle->rethrow_if_failed());
  CHECK(fetching.handle->addresses() == match(kit.pool, prompt(1, kPages)).addresses);
  CHECK(pages_cached(kit) == 3);
  CHECK(fetching.handle->stats().skipped_blocks == 1);
  CHECK_FALSE(fetching.handle->cancel());
  check_nothing_left(kit);
}

TEST_CASE("a peer is not asked for what is here, and no block is taken for what it has not") {
  SessionKit kit;
  static_cast<void>(insert(kit.pool, prompt(1, 2), alloc(*kit.pool, 2)));
  SUBCASE("all of it is here") {
    const Fetching fetching(kit, 2);
    CHECK(kit.link->sent.empty());
    CHECK(fetching.handle->addresses().size() == 2);
  }
  SUBCASE("the peer has less") {
    Fetching fetching(kit);
    fetching.found(1);
    CHECK(fetching.lets_go());
    CHECK(fetching.handle->addresses().size() == 2);
  }
  SUBCASE("the peer has nothing") {
    Fetching fetching(kit);
    fetching.found(0);
    CHECK(kit.link->sent.empty());
    CHECK(fetching.handle->addresses().size() == 2);
  }
  check_nothing_left(kit);
}

TEST_CASE("what is cached here is not evicted for what comes behind it") {
  SessionKit kit(/*one_sided=*/true, /*hbm_blocks=*/3);
  static_cast<void>(insert(kit.pool, prompt(1, 1), alloc(*kit.pool, 1)));
  static_cast<void>(insert(kit.pool, prompt(7, 2), alloc(*kit.pool, 2)));
  Fetching fetching(kit, 3);
  fetching.found(3);
  CHECK(kit.link->sent.empty());  // another thread makes room
  kit.host.run_works();
  CHECK(fetching.asked().from.size() == 2);
  kit.reply(kFetchVerb, fetching.id, fetched());
  CHECK_NOTHROW(fetching.handle->rethrow_if_failed());
  CHECK(match(kit.pool, prompt(1, 3)).hit.pages == 3);
}

TEST_CASE("a fetch for which there is no room fails, and lets go of the match") {
  SessionKit kit;
  const Addresses taken = alloc(*kit.pool, 14);
  Fetching fetching(kit, kPages, /*may_evict=*/false);
  fetching.found(kPages);
  CHECK(fetching.lets_go());
  CHECK(failure(*fetching.handle) == ErrorCode::kOutOfBlocks);
  kit.pool->free(taken.data(), taken.size());
  check_nothing_left(kit);
}

TEST_CASE("a fetch of a prompt that fails at any point leaves nothing here and holds nothing there") {
  SessionKit kit;
  auto fetching = std::make_unique<Fetching>(kit);
  const auto handle = fetching->handle;
  SUBCASE("refused by the match") {
    kit.refuse(kMatchVerb, kit.take(kMatchVerb).id, Error(ErrorCode::kBusy, "too many"));
    CHECK(failure(*handle) == ErrorCode::kBusy);
  }
  SUBCASE("cancelled before the match is answered") {
    CHECK(handle->cancel());
    CHECK(failure(*handle) == ErrorCode::kCancelled);
    fetching->found(2);
    CHECK(fetching->lets_go());
  }
  SUBCASE("too late for the match") {
    kit.session->tick(kit.host.now += 101 * kMs);
    CHECK(failure(*handle) == ErrorCode::kDeadline);
    fetching->found(2);
    CHECK(fetching->lets_go());
  }
  SUBCASE("lost before the match is answered") {
    kit.session->on_closed(Error(ErrorCode::kPeerLost, "gone"));
    CHECK(failure(*handle) == ErrorCode::kPeerLost);
  }
  SUBCASE("stale: refused by the fetch") {
    fetching->found(2);
    static_cast<void>(fetching->asked());
    kit.refuse(kFetchVerb, fetching->id, Error(ErrorCode::kStaleAddress, "freed"));
    CHECK(failure(*handle) == ErrorCode::kStaleAddress);
  }
  SUBCASE("cancelled while it is fetched") {
    fetching->found(2);
    static_cast<void>(fetching->asked());
    CHECK(handle->cancel());
    CHECK(kit.link->take().kind == FrameKind::kCancel);
    CHECK(kit.count(BlockState::kReserved) == 2);
    kit.refuse(kFetchVerb, fetching->id, Error(ErrorCode::kCancelled, "stopped"));
    CHECK(failure(*handle) == ErrorCode::kCancelled);
  }
  SUBCASE("too late for the content: the blocks are quarantined until the peer writes no more") {
    fetching->found(2);
    static_cast<void>(fetching->asked());
    kit.session->tick(kit.host.now += 101 * kMs);
    CHECK(failure(*handle) == ErrorCode::kDeadline);
    CHECK(kit.count(BlockState::kQuarantined) == 2);
    kit.reply(kFetchVerb, fetching->id, fetched());
  }
  SUBCASE("lost while it is fetched: the blocks are quarantined until the writer is gone") {
    fetching->found(2);
    static_cast<void>(fetching->asked());
    kit.session->on_closed(Error(ErrorCode::kPeerLost, "gone"));
    CHECK(failure(*handle) == ErrorCode::kPeerLost);
    CHECK(kit.count(BlockState::kQuarantined) == 2);
    kit.session->on_writer_gone();
  }
  CHECK(pages_cached(kit) == 0);
  CHECK(kit.host.tally_of.counts(TransferKind::kFetch).ended[1 + static_cast<std::size_t>(failure(*handle))] == 1);
  fetching.reset();
  check_nothing_left(kit);
}

TEST_CASE("a fetch of a prompt that is given up while another thread makes room for it gives the room back") {
  SessionKit kit(/*one_sided=*/true, /*hbm_blocks=*/16);
  for (Token id = 10; id < 14; ++id) static_cast<void>(insert(kit.pool, prompt(id, 4), alloc(*kit.pool, 4)));
  Fetching fetching(kit);
  fetching.found(kPages);
  REQUIRE(kit.host.works.size() == 1);
  kit.reply(kUnmatchVerb, fetching.match_id);  // as it may come while the call is being given up
  CHECK_FALSE(fetching.handle->done());
  SUBCASE("cancelled") {
    CHECK(fetching.handle->cancel());
    CHECK(failure(*fetching.handle) == ErrorCode::kCancelled);
    CHECK(fetching.lets_go());
  }
  SUBCASE("too late, which does not wait for the room") {
    kit.session->tick(kit.host.now += 101 * kMs);
    CHECK(fetching.handle->done());
    CHECK(failure(*fetching.handle) == ErrorCode::kDeadline);
    CHECK(fetching.lets_go());
  }
  SUBCASE("lost, which does not wait for the room") {
    kit.session->on_closed(Error(ErrorCode::kPeerLost, "gone"));
    CHECK(fetching.handle->done());
    CHECK(failure(*fetching.handle) == ErrorCode::kPeerLost);
    kit.link->closed = true;
  }
  kit.host.run_works();
  CHECK(fetching.handle->done());
  CHECK(kit.link->sent.empty());
  check_nothing_left(kit);
}

TEST_CASE("a prompt that came in another way meanwhile is not kept twice") {
  SessionKit kit;
  Fetching fetching(kit);
  SUBCASE("before there were blocks for it") {
    static_cast<void>(insert(kit.pool, prompt(1, 2), alloc(*kit.pool, 2)));
    fetching.found(2);
    CHECK(fetching.lets_go());
  }
  SUBCASE("while it was fetched") {
    fetching.found(2);
    static_cast<void>(fetching.asked());
    static_cast<void>(insert(kit.pool, prompt(1, 2), alloc(*kit.pool, 2)));
    kit.reply(kFetchVerb, fetching.id, fetched());
  }
  CHECK_NOTHROW(fetching.handle->rethrow_if_failed());
  CHECK(fetching.handle->addresses() == match(kit.pool, prompt(1, 2)).addresses);
  CHECK(kit.count(BlockState::kHistorical) == 2);
  CHECK(kit.count(BlockState::kFree) == 14);
  check_nothing_left(kit);
}

TEST_CASE("a prompt that this pool has begun to fill itself is not fetched over that, and the blocks are free again") {
  SessionKit kit;
  Fetching fetching(kit);
  fetching.found(2);
  static_cast<void>(fetching.asked());
  const Addresses own = alloc(*kit.pool, 2);
  const Tokens tokens = prompt(1, 2);
  Addresses canonical(2);
  const InsertItem item{tokens.data(), tokens.size(), own.data(), 2, canonical.data()};
  Pins pins(kit.pool, kit.pool->insert_unfilled("", item, false).pin);
  kit.reply(kFetchVerb, fetching.id, fetched());
  CHECK(failure(*fetching.handle) == ErrorCode::kBusy);
  CHECK(kit.count(BlockState::kFree) == 14);
  kit.pool->filled(own);
  pins.release();
  check_nothing_left(kit);
}

TEST_CASE("content that is being placed when the peer says that it is done keeps the prompt out of the index") {
  SessionKit kit(/*one_sided=*/false);
  Fetching fetching(kit);
  fetching.found(2);
  const FetchBody body = fetching.asked();
  const Placement placement = kit.data(fetching.id, body.to);
  REQUIRE(!placement.pieces.empty());
  kit.reply(kFetchVerb, fetching.id, fetched());
  CHECK(failure(*fetching.handle) == ErrorCode::kProtocol);
  CHECK(pages_cached(kit) == 0);
  CHECK(kit.count(BlockState::kQuarantined) == 2);
  kit.session->on_placed(placement.token, true);
  check_nothing_left(kit);
}

TEST_CASE("a peer that answers what it was not asked, or more than was asked, is disconnected") {
  SessionKit kit;
  Fetching fetching(kit, 2);
  const std::uint64_t id = kit.take(kMatchVerb).id;
  const auto wrong = [&](const Bytes& answer) {
    return code_of([&] { kit.reply(kMatchVerb, id, answer); }) == ErrorCode::kProtocol;
  };
  CHECK(wrong(write_body(MatchedBody{1000, SessionKit::peer_addresses(3)})));
  CHECK(wrong(write_body(MatchedBody{1000, {make_address(kOwnInstance, Medium::kHbm, 1, 0)}})));
  CHECK(wrong(Bytes(3)));
  CHECK(code_of([&] { kit.reply(kFetchVerb, id, fetched()); }) == ErrorCode::kProtocol);
  kit.session->on_closed(Error(ErrorCode::kPeerLost, "gone"));
  CHECK(failure(*fetching.handle) == ErrorCode::kPeerLost);
  check_nothing_left(kit);
}

void fetch_out_of_memory(bool early) {
  int attempts = 0;
  fail_each_allocation([&](auto&& fail) {
    ++attempts;
    SessionKit kit;
    static_cast<void>(insert(kit.pool, prompt(1, 1), alloc(*kit.pool, 1)));
    std::unique_ptr<Fetching> fetching;
    const auto begin = [&] { fetching = std::make_unique<Fetching>(kit); };
    if (!early) {
      begin();
    } else if (fail(begin)) {
      fetching = nullptr;
    }
    if (fetching != nullptr && !kit.link->closed) {
      fetching->match_id = kit.take(kMatchVerb).id;
      Message reply{FrameKind::kAnswer, kMatchVerb.number, fetching->match_id,
                    write_body(MatchedBody{1000, SessionKit::peer_addresses(3)}), 0};
      const auto answer = [&] { kit.session->on_message(std::move(reply)); };
      if (early) {
        answer();
      } else if (fail(answer)) {
        kit.session->on_closed(Error(ErrorCode::kPeerLost, "as the link does then"));
      }
    }
    if (!kit.session->link_ended()) kit.session->on_closed(Error(ErrorCode::kPeerLost, "gone"));
    kit.host.run_works();
    kit.session->on_writer_gone();
    if (fetching != nullptr) CHECK(fetching->handle->done());
    fetching.reset();
    check_nothing_left(kit);
  });
  CHECK(attempts > 5);
}

TEST_CASE("a fetch of a prompt that runs out of memory leaves nothing behind") {
  SUBCASE("when it is begun") { fetch_out_of_memory(true); }
  SUBCASE("when the match is answered") { fetch_out_of_memory(false); }
}

}  // namespace
}  // namespace kvpool::testing
