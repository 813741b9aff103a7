// The receiving half of the protocol when memory runs out.
#include <doctest/doctest.h>

#include "failing_alloc.h"
#include "session_kit.h"

namespace kvpool::testing {
namespace {

constexpr std::uint64_t kId = 5;

// After the failure the peer gives up, returns the lent blocks and disconnects: nothing is left.
void leave(SessionKit& kit) {
  if (!kit.link->closed) {
    kit.ask(kAbandonVerb, kId);
    kit.link->closed = true;
  }
  kit.host.run_works();
  kit.session->on_closed(Error(ErrorCode::kPeerLost, "gone"));
  kit.session->on_writer_gone();
  while (const auto item = kit.received.pop(0)) {
    if (item->inserted) {
      kit.pool->unpin(&item->pin, 1);
    } else {
      kit.pool->free(item->addresses.data(), item->addresses.size());
    }
  }
  kit.pool->evict(100, kMixed);
  CHECK(kit.count(BlockState::kFree) == 16);
  CHECK(kit.session->counts().promised == 0);
  CHECK(kit.session->counts().transfers == 0);
}

TEST_CASE("running out of memory while serving a peer ends in an answer or the end of the link, and nothing leaks") {
  enum class Way : std::uint8_t {
    kReserve,
    kReserveInsert,
    kLend,
    kComplete,
    kCompleteInsert,
    kCompleteVerified,
    kNamedInsert,
    kReturn
  };
  for (const Way way : {Way::kReserve, Way::kReserveInsert, Way::kLend, Way::kComplete, Way::kCompleteInsert,
                        Way::kCompleteVerified, Way::kNamedInsert, Way::kReturn}) {
    CAPTURE(static_cast<int>(way));
    int attempts = 0;
    fail_each_allocation([&](auto&& fail) {
      ++attempts;
      SessionKit kit;
      const bool insert = way == Way::kReserveInsert || way == Way::kCompleteInsert;
      ReserveBody body = SessionKit::reservation(2);
      body.insert = insert;
      if (insert) body.tokens = prompt(1, 2);
      CompleteBody completion = kit.completion(2);
      Message message{FrameKind::kCall, kReserveVerb.number, kId, write_body(body)};
      if (way == Way::kLend)
        message = {FrameKind::kCall, kLendVerb.number, kId, write_body(LendBody{2, Medium::kHbm, false})};
      if (way == Way::kReturn || way == Way::kNamedInsert) {
        completion.named = kit.lend(50, 2);
        message = {FrameKind::kCall, kReturnVerb.number, kId, write_addresses(completion.named)};
      }
      if (way == Way::kNamedInsert) {
        completion.insert = true;
        completion.tokens = prompt(1, 2);
        message = {FrameKind::kCall, kCompleteVerb.number, kId, write_body(completion)};
      }
      if (way == Way::kComplete || way == Way::kCompleteInsert || way == Way::kCompleteVerified) {
        const Addresses blocks = kit.reserve(kId, body);
        completion.has_checksum = way == Way::kCompleteVerified;
        completion.checksum = kit.peer_blocks.checksum(blocks);
        message = {FrameKind::kCall, kCompleteVerb.number, kId, write_body(completion)};
      }
      kit.link->sent.reserve(8);
      // An error that is thrown at a link ends it.
      fail([&] {
        try {
          kit.session->on_message(std::move(message));
          kit.host.run_works();
        } catch (const std::bad_alloc&) {
          kit.link->close(Error(ErrorCode::kOutOfMemory, ""));
          throw;
        } catch (const Error&) {
          kit.link->close(Error(ErrorCode::kOutOfMemory, ""));
        }
      });
      CHECK((kit.link->sent.size() == 1 || kit.link->closed));
      leave(kit);
    });
    CHECK(attempts > 2);
  }
}

}  // namespace
}  // namespace kvpool::testing
