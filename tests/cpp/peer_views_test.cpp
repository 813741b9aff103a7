// What a pool holds for a peer that views its blocks, when the link ends before the peer is proved to be gone.
#include "kvpool/views/peer_views.h"

#include <doctest/doctest.h>

#include <memory>

#include "kvpool/sequences/attender.h"
#include "kvpool/views/lent_attends.h"
#include "sequence_kit.h"
#include "session_kit.h"

namespace kvpool::testing {
namespace {

// The session only carries calls: the views are in a pool that attention can read.
struct ViewsKit : SessionKit {
  ViewsKit() { views->serve(session->calls()); }

  // The peer views a block that its owner then frees.
  void view_one(bool by_mapping) {
    const Addresses block = alloc(*viewed, 1);
    ask(kViewVerb, 1, write_body(ViewBody{1, by_mapping, 0, block}));
    host.run_works();
    REQUIRE(answer().kind == FrameKind::kAnswer);
    viewed->free(block.data(), 1);
  }

  const std::shared_ptr<Pool> viewed = std::make_shared<Pool>(attendable(8));
  Attender attender{viewed->executor(), 1};
  LentAttends attends{*viewed, attender, viewed->executor(), 4};
  const std::shared_ptr<PeerViews> views =
      std::make_shared<PeerViews>(*viewed, attends, kPeerIncarnation, /*by_mapping=*/true);
};

TEST_CASE("the end of a link ends a view, unless the peer may still read through a mapping") {
  for (const bool by_mapping : {false, true}) {
    CAPTURE(by_mapping);
    ViewsKit kit;
    kit.view_one(by_mapping);
    CHECK(free_blocks(*kit.viewed) == 7);
    CHECK(kit.views->awaits_proof() == by_mapping);
    kit.views->on_lost();
    CHECK(free_blocks(*kit.viewed) == (by_mapping ? 7 : 8));
    CHECK(kit.views->has_any() == by_mapping);
    kit.views->on_reader_gone();
    CHECK(free_blocks(*kit.viewed) == 8);
    CHECK_FALSE(kit.views->awaits_proof());
    kit.attends.stop();
  }
}

}  // namespace
}  // namespace kvpool::testing
