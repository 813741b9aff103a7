// How the scheduler of a logical instance handles its ranks' answers, with links that follow a script.
#include "kvpool/ranks/rank_hub.h"

#include <doctest/doctest.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "failing_alloc.h"
#include "kvpool/base/clock.h"
#include "kvpool/net/reactor.h"
#include "kvpool/ranks/group_route.h"
#include "kvpool/routes/route_choice.h"
#include "kvpool/routes/route_error.h"
#include "kvpool/transfer/failure.h"
#include "kvpool/transfer/messages.h"
#include "silent_link.h"
#include "swap_kit.h"
#include "thrown.h"

namespace kvpool::testing {
namespace {

// To a rank that answers, in the thread that asks, as the test says.
class RankLink final : public SilentLink {
 public:
  void send(Message&& message) override { on_sent(message.id); }
  std::int64_t process() const noexcept override { return 0; }

  std::function<void(std::uint64_t id)> on_sent = [](std::uint64_t) {};
};

// A scheduler with its two ranks.
struct Instance {
  static Sharding two_ranks() {
    Parallel parallel;
    parallel.tp = 2;
    return {{2, 2, 4, DType::kFloat32, 4}, parallel};
  }
  explicit Instance(std::uint32_t joined = 2)
      : hub(two_ranks(), {8, 8}, [this](const Error& why) { lost = why.code(); }) {
    for (std::uint32_t rank = 0; rank < joined; ++rank) {
      const Layout layout = hub.sharding().rank_layout(rank, true);
      PeerMetadata metadata;
      metadata.rank = rank;
      metadata.block_tokens = static_cast<std::uint32_t>(layout.block_tokens);
      metadata.piece_bytes.assign(layout.piece_bytes.begin(), layout.piece_bytes.end());
      metadata.format = layout.format;
      metadata.media[Medium::kHbm].blocks = metadata.media[Medium::kDram].blocks = 8;
      handlers.push_back(hub.admit(links.emplace_back(std::make_shared<RankLink>()), metadata));
    }
  }
  static Message answer_to(std::uint64_t id, std::optional<ErrorCode> refusal) {
    Message message;
    message.id = id;
    message.kind = refusal ? FrameKind::kRefused : FrameKind::kAnswer;
    if (refusal) message.body = write_error(Error(*refusal, "it cannot now", {{"retry_after_us", 5}}));
    return message;
  }
  void answer(std::size_t rank, std::uint64_t id, std::optional<ErrorCode> refusal = std::nullopt) {
    handlers[rank]->on_message(answer_to(id, refusal));
  }
  // From now on, as a rank's process says it.
  void refuses(std::size_t rank, const Error& why) {
    links[rank]->on_sent = [this, rank, why](std::uint64_t id) {
      handlers[rank]->on_message({FrameKind::kRefused, 0, id, write_error(for_peer(why))});
    };
  }
  // From now on, at once.
  void answers(std::size_t rank, std::optional<ErrorCode> refusal = std::nullopt) {
    links[rank]->on_sent = [this, rank, refusal](std::uint64_t id) { answer(rank, id, refusal); };
  }
  std::optional<ErrorCode> move() {
    const Address from = make_address(0, Medium::kHbm, 1, 3);
    const Address to = make_address(0, Medium::kDram, 1, 2);
    return code_of([&] { hub.move(&from, &to, 1); });
  }

  std::optional<ErrorCode> lost;
  RankHub hub;
  std::vector<std::shared_ptr<RankLink>> links;
  std::vector<std::shared_ptr<LinkHandler>> handlers;
};

TEST_CASE("a rank that cannot copy now fails the move, and the instance goes on") {
  for (const ErrorCode code : {ErrorCode::kState, ErrorCode::kOutOfMemory, ErrorCode::kUnsupported}) {
    CAPTURE(static_cast<int>(code));
    Instance instance;
    instance.answers(0);
    instance.answers(1, code);
    CHECK(instance.move() == code);
    CHECK_FALSE(instance.lost);
    instance.answers(1);
    CHECK_FALSE(instance.move());
  }
}

TEST_CASE("nothing moves before all ranks have joined") {
  for (const std::uint32_t joined : {0, 1}) {
    CAPTURE(joined);
    Instance instance(joined);
    for (const auto& link : instance.links) link->on_sent = [](std::uint64_t) { FAIL("a rank was asked"); };
    CHECK(instance.move() == ErrorCode::kBusy);
    CHECK_FALSE(instance.lost);
  }
}

TEST_CASE("losing a rank in a move ends the instance") {
  Instance instance;
  instance.answers(0);
  instance.links[1]->on_sent = [&](std::uint64_t) {
    instance.handlers[1]->on_closed(Error(ErrorCode::kDeviceLost, "the GPU is gone"));
  };
  CHECK(instance.move() == ErrorCode::kPeerLost);
  CHECK(instance.lost == ErrorCode::kPeerLost);
  CHECK(instance.move() == ErrorCode::kPeerLost);
}

TEST_CASE("a move for which one rank could not be asked ends when the others have answered") {
  Instance instance;
  std::atomic<std::uint64_t> asked{0};
  std::atomic<bool> answered{false};
  instance.links[0]->on_sent = [&](std::uint64_t id) { asked = id; };
  instance.links[1]->on_sent = [](std::uint64_t) { throw Error(ErrorCode::kBusy, "too much is queued"); };
  std::thread rank([&] {
    while (asked == 0) usleep(100);
    usleep(20'000);  // long enough to notice a caller that does not wait
    answered = true;
    instance.answer(0, asked);
  });
  CHECK(instance.move() == ErrorCode::kBusy);
  CHECK(answered);
  rank.join();
  CHECK_FALSE(instance.lost);
}

TEST_CASE("a route between ranks may fail and be used again, with the same errors as between pools") {
  struct Case {
    Error said;  // by each of the ranks
    ErrorCode code;
    bool able;
  };
  const std::vector<Case> cases = {
      {{ErrorCode::kRouteFailed, "NCCL", {{"nccl_code", 2}}}, ErrorCode::kRouteFailed, true},
      {{ErrorCode::kRouteFailed, "odd", {{"driver_code", 304}}}, ErrorCode::kRouteFailed, true},
      {Error(ErrorCode::kUnsupported, "odd", {{"driver_code", 304}}).because(ErrorCause::kMayPass),
       ErrorCode::kRouteFailed, true},
      {{ErrorCode::kUnsupported, "never", {{"driver_code", 801}}}, ErrorCode::kUnsupported, false},
      {{ErrorCode::kUnsupported, "there is no route"}, ErrorCode::kUnsupported, false},
  };
  for (const Case& each : cases) {
    CAPTURE(std::string(each.said.what()));
    Instance instance;
    for (std::size_t rank = 0; rank < 2; ++rank) instance.refuses(rank, route_error(each.said));
    const Sharding& sharding = instance.hub.sharding();
    const auto group = make_group_route(std::make_shared<const ReshardPlan>(plan_reshard(sharding, sharding)),
                                        instance.hub.writers(5));
    const std::vector<BlockStrip> strips = {{0, 0, sharding.shape().block_bytes()}};
    const Address from = make_address(0, Medium::kHbm, 1, 3);
    const Address to = make_address(7, Medium::kHbm, 1, 2);
    WriteRequest request;
    request.strips = strips;
    request.from = std::span(&from, 1);
    request.to = std::span(&to, 1);
    request.deadline_ns = monotonic_ns() + 10'000'000'000;
    const auto error = error_of([&] { write_by(*group, request); });
    REQUIRE(error);
    CHECK(error->code() == each.code);
    REQUIRE(error->fields().size() == each.said.fields().size());
    for (std::size_t i = 0; i < error->fields().size(); ++i) {
      CHECK(std::string(error->fields()[i].first) == each.said.fields()[i].first);
      CHECK(error->fields()[i].second == each.said.fields()[i].second);
    }
    CHECK(group->health().able() == each.able);
    CHECK_FALSE(instance.lost);
  }
}

TEST_CASE("a refusal that runs out of memory ends its move, which fails") {
  bool more = true;
  for (std::uint64_t n = 1; more; ++n) {
    CAPTURE(n);
    Instance instance;
    instance.answers(0);
    instance.links[1]->on_sent = [&](std::uint64_t id) {
      Message refusal = Instance::answer_to(id, ErrorCode::kBusy);
      const FailNthAllocation failure(n);
      instance.handlers[1]->on_message(std::move(refusal));
      more = failure.failed_one();
    };
    std::atomic<bool> over{false};
    std::atomic<bool> threw{false};
    std::thread mover([&] {
      try {
        threw = instance.move().has_value();
      } catch (const std::bad_alloc&) {
        threw = true;
      }
      over = true;
    });
    REQUIRE(eventually([&] { return over.load(); }));
    mover.join();
    CHECK(threw);
    CHECK_FALSE(instance.lost);
    CHECK((!more || n < 100));
    instance.answers(1);
    CHECK_FALSE(instance.move());
  }
}

}  // namespace
}  // namespace kvpool::testing
