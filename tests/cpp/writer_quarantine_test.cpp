// How long a disconnected peer is watched, which depends on the memory it was given.
#include "kvpool/peers/writer_quarantine.h"

#include <doctest/doctest.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "failing_alloc.h"
#include "kvpool/base/clock.h"
#include "kvpool/net/descriptor.h"
#include "session_kit.h"
#include "thrown.h"

namespace kvpool::testing {
namespace {

// A link to a process that ends when the test says so.
class ProcessLink final : public Link {
 public:
  void send(Message&&) override {}
  void send_data(std::uint64_t, std::span<const std::byte>, std::span<const iovec>, std::int64_t,
                 const std::atomic<bool>*) override {}
  bool drive(std::int64_t, const std::function<bool()>& done) override { return done(); }
  void wake() noexcept override {}
  int descriptor(std::size_t) const noexcept override { return -1; }
  int pidfd() const noexcept override { return process_.get(); }
  std::string describe() const override { return "process"; }
  std::shared_ptr<void> attachment() const override { return attached; }
  void close(const Error&) noexcept override {}

  std::shared_ptr<void> attached;

  void end_process() { KVPOOL_CHECK(eventfd_write(process_.get(), 1) == 0); }

 private:
  const Descriptor process_ = Descriptor::open([] { return eventfd(0, EFD_CLOEXEC); });
};

// A peer that has nothing under way, unless the test says so.
class Party final : public DepartingPeer {
 public:
  explicit Party(bool said_over) : said_over_(said_over) {
    metadata_.incarnation = kPeerIncarnation;
    metadata_.name = "writer";
  }
  const PeerMetadata& peer() const noexcept override { return metadata_; }
  bool awaits_proof() const override { return awaits && !gone; }
  bool said_over() const noexcept override { return said_over_; }
  bool link_ended() const noexcept override { return true; }
  void on_writer_gone() override { gone = true; }
  std::uint32_t writes_under_way() const noexcept override { return writes; }
  std::atomic<bool> awaits{false};
  std::atomic<bool> gone{false};
  std::atomic<std::uint32_t> writes{0};

 private:
  const bool said_over_;
  PeerMetadata metadata_;
};

struct Watch {
  ~Watch() {
    waits.stop();
    reactor->stop();
  }
  std::shared_ptr<Party> part(bool said_over, Exposure exposure) {
    auto party = std::make_shared<Party>(said_over);
    writer_quarantine.add(party, link, exposure);
    return party;
  }
  int left() {
    int count = 0;
    writer_quarantine.clear([&](const auto&, const auto&) { ++count; });
    return count;
  }
  std::unique_ptr<Reactor> reactor = std::make_unique<Reactor>("test");
  Executor executor;
  SerialExecutor waits{executor, {1, 1}};
  WriterQuarantine writer_quarantine{*reactor, waits};
  const std::shared_ptr<ProcessLink> link = std::make_shared<ProcessLink>();
};

constexpr Exposure kByRoute{.by_process = true, .by_handle = true};
constexpr Exposure kByUcx{.by_process = true, .by_handle = true, .until_exit = true, .until_fence = true};

bool soon(const std::atomic<bool>& flag) {
  const std::int64_t until = monotonic_ns() + 30'000'000'000;
  while (!flag && monotonic_ns() < until) usleep(1000);
  return flag;
}

TEST_CASE("a peer with open handles is watched until it says that it has closed them, or its process ends") {
  for (const bool said_over : {false, true}) {
    Watch watch;
    watch.part(said_over, kByRoute);
    CHECK(watch.left() == (said_over ? 0 : 1));
  }
  Watch watch;
  const auto party = watch.part(false, kByRoute);
  watch.link->end_process();
  CHECK(soon(party->gone));
  CHECK(watch.left() == 0);
}

TEST_CASE("memory that UCX has opened for a peer counts as open until the peer's process ends") {
  for (const bool said_over : {false, true}) {
    Watch watch;
    const auto party = watch.part(said_over, kByUcx);
    watch.waits.stop();  // its worker is closed by now: that is no proof of it
    watch.writer_quarantine.on_drained(*party);
    CHECK_FALSE(party->gone);
    CHECK(watch.left() == 1);
  }
  Watch watch;
  const auto party = watch.part(true, kByUcx);
  watch.waits.stop();
  watch.link->end_process();
  CHECK(soon(party->gone));
  CHECK(watch.left() == 0);
}

TEST_CASE("a peer that reconnects is watched through the new connection for what it has open") {
  Watch watch;
  const auto party = watch.part(true, kByUcx);
  watch.waits.stop();
  watch.writer_quarantine.on_writer_gone(kPeerIncarnation);
  CHECK(party->gone);
  watch.part(true, kByUcx);
  CHECK(watch.left() == 1);
}

TEST_CASE("a peer whose blocks wait for a proof is named until the proof is there") {
  Watch watch;
  watch.part(false, kByRoute);  // it has memory open, and no block waits
  CHECK(watch.writer_quarantine.awaited().empty());
  const auto party = std::make_shared<Party>(false);
  party->awaits = true;
  watch.writer_quarantine.add(party, watch.link, kByRoute);
  CHECK(watch.writer_quarantine.awaited() == std::vector<std::string>{"writer"});
  watch.writer_quarantine.on_writer_gone(kPeerIncarnation);
  CHECK(party->gone);
  CHECK(watch.writer_quarantine.awaited().empty());
}

TEST_CASE("a peer that comes back is refused while writes to its earlier connection are under way") {
  Watch watch;
  auto party = std::make_shared<Party>(true);
  party->writes = 1;
  watch.writer_quarantine.add(party, watch.link, kByRoute);
  CHECK(code_of([&] { watch.writer_quarantine.check_return(kPeerIncarnation); }) == ErrorCode::kBusy);
  CHECK_NOTHROW(watch.writer_quarantine.check_return(kPeerIncarnation + 1));
  CHECK(watch.writer_quarantine.is_writing_to(kPeerIncarnation));
  party->writes = 0;
  CHECK_NOTHROW(watch.writer_quarantine.check_return(kPeerIncarnation));
  watch.writer_quarantine.on_drained(*party);
  CHECK(watch.left() == 0);
}

// A transport whose grants prove nothing when they are asked for the first time.
std::atomic<int> fences_asked{0};

class SlowFences final : public Transport {
 public:
  std::shared_ptr<Grant> offer(const LocalMemory&, Offer&) override {
    struct SlowGrant final : Grant {
      bool fence() noexcept override { return ++fences_asked > 1; }
    };
    return std::make_shared<SlowGrant>();
  }
  void connect(const LocalMemory&, const PeerEnd&, Grant*, Routes&) override {}
};

constexpr TransportKind kSlowFences{
    "slow", true, [](const TransportSetup&) -> std::unique_ptr<Transport> { return std::make_unique<SlowFences>(); }};
constexpr Exposure kByFenceAlone{.until_fence = true};

bool may_return(const Watch& watch) {
  return !code_of([&] { watch.writer_quarantine.check_return(kPeerIncarnation); });
}

TEST_CASE("a fence that proves nothing is asked again, and then the peer may come back") {
  const SessionKit kit;
  Executor executor;
  const RouteMaker routes(ServiceOptions{}, LocalMemory{kit.pool->layout(), kit.pool->arenas()}, 1, executor, {},
                          {&kSlowFences, 1});
  fences_asked = 0;
  Watch watch;
  watch.link->attached = routes.introduce().attachment;
  const auto party = watch.part(true, kByFenceAlone);
  CHECK_FALSE(may_return(watch));
  CHECK(soon(party->gone));
  CHECK(fences_asked == 2);
  CHECK(may_return(watch));
  CHECK(watch.left() == 0);
}

TEST_CASE("when memory runs out, a peer is not in quarantine, or it leaves as any other does") {
  constexpr Exposure kByAll{.by_process = true, .by_handle = true, .until_fence = true};
  const int threw = fail_each_allocation([&](auto&& fail) {
    Watch watch;
    watch.link->end_process();
    const auto party = std::make_shared<Party>(false);
    const bool thrown = fail([&] { watch.writer_quarantine.add(party, watch.link, kByAll); });
    if (!thrown) CHECK(soon(party->gone));
    CHECK(may_return(watch));
    CHECK(watch.left() == 0);
  });
  CHECK(threw > 0);
}

TEST_CASE("a peer leaves the quarantine without memory") {
  Watch watch;
  const auto party = watch.part(false, kByRoute);
  {
    const FailNthAllocation failure(1);
    watch.writer_quarantine.on_writer_gone(kPeerIncarnation);
    CHECK_FALSE(failure.failed_one());
  }
  CHECK(party->gone);
  CHECK(watch.left() == 0);
}

}  // namespace
}  // namespace kvpool::testing
