// Streams that wait for a fetch: what they find, how they continue when it fails, and who then owns the blocks.
#include "kvpool/peers/wait_on.h"

#include <doctest/doctest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "device_kit.h"
#include "joined_service.h"
#include "kvpool/cuda/order.h"
#include "swap_kit.h"

#ifdef KVPOOL_FAKE_CUDA

namespace kvpool::testing {
namespace {

constexpr const char* kRoutes[] = {"loopback", "cuda_ipc", "sock"};
constexpr double kLong = 60;

// Pool a, on GPU 0, fetches from b: on another GPU, or on none (-1).
class Pulling {
 public:
  explicit Pulling(const std::string& route, int owner = 1, int version = 13000) : routes_{route} {
    cuda_.set("delay_us", 10);
    cuda_.set("version", version);
    a_.emplace("a", routes_, on(0), Change());
    b_.emplace("b", routes_, on(owner), Change());
    a_->meet(*b_);
  }
  ~Pulling() {
    c_.reset();
    b_.reset();
    a_.reset();
    // Pages of words stay.
    const std::string left = cuda_.left();
    CHECK_MESSAGE((left == "" || left == "registered=1" || left == "registered=2"), left);
    CHECK(cuda_.count("pageable") == 0);
  }
  Pulling(const Pulling&) = delete;
  Pulling& operator=(const Pulling&) = delete;

  const FakeCuda& cuda() const { return cuda_; }
  ServiceNode& a() { return *a_; }
  ServiceNode& b() { return *b_; }
  // Another owner, on GPU 2.
  ServiceNode& c() {
    if (!c_) {
      c_.emplace("c", routes_, on(2), Change());
      a_->connect(*c_);
    }
    return *c_;
  }

  static FetchRequest request(ServiceNode& owner, const Addresses& from, const Addresses& to = {},
                              double seconds = kLong) {
    FetchRequest request;
    request.peer = owner.name();
    request.from = from;
    request.to = to;
    request.deadline_ns = real_seconds(seconds);
    return request;
  }
  std::shared_ptr<Transfer> fetch(const Addresses& from, const Addresses& to = {}, double seconds = kLong) {
    return a_->service().fetch(request(*b_, from, to, seconds));
  }
  void wait_on(Transfer& fetch, const EngineStream& stream) { kvpool::wait_on(*a_->pool(), fetch, stream.handle()); }
  static std::optional<ErrorCode> end_of(Transfer& transfer) {
    REQUIRE(transfer.wait(real_seconds(2 * kLong)));
    return code_of([&] { transfer.rethrow_if_failed(); });
  }

 private:
  using Change = std::function<void(ServiceOptions&)>;
  static PairOptions on(int device) {
    PairOptions options;
    options.device = device;
    return options;
  }

  const FakeCuda cuda_;
  const std::vector<std::string> routes_;
  std::optional<ServiceNode> a_;
  std::optional<ServiceNode> b_;
  std::optional<ServiceNode> c_;
};

TEST_CASE("a stream that waits for a fetch finds the content, and no thread has waited") {
  for (const char* route : kRoutes) {
    for (const bool named : {true, false}) {
      CAPTURE(route);
      CAPTURE(named);
      Pulling pair(route);
      Pool& pool = *pair.a().pool();
      const EngineStream owners(pair.cuda(), 1);
      const EngineStream first(pair.cuda());
      const EngineStream second(pair.cuda());
      const Addresses from = alloc_stamped(*pair.b().pool(), 3, 10);
      Gate gate(owners);  // the owner begins when it opens
      const auto fetch = pair.fetch(from, named ? alloc_stamped(pool, 3, 90) : Addresses());
      const Addresses to = fetch->addresses();
      std::atomic<int> right{0};
      std::atomic<int> ended{0};
      for (const EngineStream* stream : {&first, &second, &first}) {
        pair.wait_on(*fetch, *stream);
        stream->run([&] {
          right += are_stamped(pool, to, 10) ? 1 : 0;
          ended += fetch->done() ? 1 : 0;
        });
      }
      CHECK_FALSE(fetch->done());
      gate.open();
      first.wait();
      second.wait();
      CHECK(right == 3);
      CHECK(ended == 3);
      CHECK_FALSE(pair.end_of(*fetch));
      free_all(pool, to);
    }
  }
}

TEST_CASE("dropping a handle does not hold up the stream that waits") {
  Pulling pair("sock");
  Pool& pool = *pair.a().pool();
  const EngineStream owners(pair.cuda(), 1);
  const EngineStream engine(pair.cuda());
  const Addresses from = alloc_stamped(*pair.b().pool(), 3, 10);
  const Addresses to = alloc(pool, 3);
  std::atomic<bool> right{false};
  {
    Gate gate(owners);
    pair.wait_on(*pair.fetch(from, to), engine);
    engine.run([&] { right = are_stamped(pool, to, 10); });
  }
  engine.wait();
  CHECK(right);
}

TEST_CASE("nothing is queued in the stream for a finished fetch, and a failed one says so") {
  Pulling pair("sock");
  const EngineStream engine(pair.cuda());
  Pool& owner = *pair.b().pool();
  const Addresses from = alloc_stamped(owner, 2, 10);
  const auto done = pair.fetch(from);
  CHECK_FALSE(pair.end_of(*done));
  pair.wait_on(*done, engine);
  free_all(owner, from);
  const auto failed = pair.fetch(from);
  CHECK(pair.end_of(*failed) == ErrorCode::kStaleAddress);
  CHECK(code_of([&] { pair.wait_on(*failed, engine); }) == ErrorCode::kStaleAddress);
  CHECK(pair.cuda().count("cuStreamWaitValue32") == 0);
  CHECK(pair.a().count(BlockState::kActive) == 2);
}

enum class End : std::uint8_t { kCancelled, kLate, kOwnerCloses, kDisconnected, kClosed };

ErrorCode code_of_end(End end) {
  switch (end) {
    case End::kCancelled:
      return ErrorCode::kCancelled;
    case End::kLate:
      return ErrorCode::kDeadline;
    case End::kClosed:
      return ErrorCode::kClosed;
    default:
      return ErrorCode::kPeerLost;
  }
}

TEST_CASE("when a fetch fails in any way, its streams continue and its blocks are kept until the handle is gone") {
  for (const char* route : {"cuda_ipc", "sock"}) {
    for (const End end : {End::kCancelled, End::kLate, End::kOwnerCloses, End::kDisconnected, End::kClosed}) {
      CAPTURE(route);
      CAPTURE(static_cast<int>(end));
      Pulling pair(route);
      const EngineStream owners(pair.cuda(), 1);
      const EngineStream engine(pair.cuda());
      const Addresses from = alloc_stamped(*pair.b().pool(), 3, 10);
      std::atomic<bool> ended{false};
      {
        Gate gate(owners);
        auto fetch = pair.fetch(from, {}, end == End::kLate ? 0.1 : kLong);
        // Late already, perhaps, on a machine that is slow.
        const auto code = code_of([&] { pair.wait_on(*fetch, engine); });
        if (code) CHECK((end == End::kLate && *code == ErrorCode::kDeadline));
        engine.run([&] { ended = fetch->done(); });
        if (end == End::kCancelled) CHECK(fetch->cancel());
        // The owner's memory is given back only when its GPU stands still, and its stream does not end before this
        // fetch.
        if (end == End::kOwnerCloses) pair.cuda().set("unmap_waits", 0);
        if (end == End::kOwnerCloses) pair.b().pool()->close();
        if (end == End::kDisconnected) pair.a().service().disconnect("b");
        if (end == End::kClosed) pair.a().pool()->close();
        engine.wait();  // no thread waits for the handle
        CHECK(ended);
        CHECK(code_of([&] { fetch->rethrow_if_failed(); }) == code_of_end(end));
        if (end == End::kClosed) continue;
        gate.open();
        owners.wait();
        if (!code) CHECK(pair.a().count(BlockState::kQuarantined) == 3);
        fetch.reset();
      }
      CHECK(eventually([&] { return pair.a().count(BlockState::kFree) == 32; }));
    }
  }
}

TEST_CASE("named blocks belong to the caller when a fetch that a stream waits for has failed") {
  Pulling pair("cuda_ipc");
  const EngineStream owners(pair.cuda(), 1);
  const EngineStream engine(pair.cuda());
  const Addresses from = alloc_stamped(*pair.b().pool(), 3, 10);
  const Addresses to = alloc(*pair.a().pool(), 3);
  Gate gate(owners);
  const auto fetch = pair.fetch(from, to);
  pair.wait_on(*fetch, engine);
  CHECK(fetch->cancel());
  engine.wait();
  CHECK(pair.end_of(*fetch) == ErrorCode::kCancelled);
  CHECK(pair.a().count(BlockState::kActive) == 3);
  free_all(*pair.a().pool(), to);
}

TEST_CASE("a wait that is refused changes nothing") {
  Pulling pair("sock");
  const EngineStream owners(pair.cuda(), 1);
  const EngineStream engine(pair.cuda());
  Pool& pool = *pair.a().pool();
  const Addresses from = alloc_stamped(*pair.b().pool(), 3, 10);
  {
    Gate gate(owners);
    const auto fetch = pair.fetch(from);
    CHECK(code_of([&] { pair.wait_on(*fetch, owners); }) == ErrorCode::kArgument);
    CHECK(code_of([&] { kvpool::wait_on(pool, *fetch, std::nullopt); }) == ErrorCode::kArgument);
    engine.begin_capture();
    CHECK(code_of([&] { pair.wait_on(*fetch, engine); }) == ErrorCode::kState);
    engine.end_capture();
    pair.cuda().set("wait_value", 0);
    CHECK(code_of([&] { pair.wait_on(*fetch, engine); }) == ErrorCode::kUnsupported);
    pair.cuda().set("wait_value", 1);
    const auto sent = pair.a().transfer([&] {
      TransferRequest request;
      request.from = alloc_stamped(pool, 1, 70);
      request.deadline_ns = real_seconds(kLong);
      return request;
    }());
    CHECK(code_of([&] { pair.wait_on(*sent, engine); }) == ErrorCode::kState);
    CHECK_FALSE(pair.end_of(*sent));
    // No stream waits: the blocks are free when it has failed, though the handle is there.
    CHECK(fetch->cancel());
    CHECK(pair.end_of(*fetch) == ErrorCode::kCancelled);
    CHECK(pair.a().count(BlockState::kQuarantined) == 0);
  }
  ServiceNode without("without", {"sock"}, PairOptions{}, {});
  without.connect(pair.b());
  const auto fetch = without.service().fetch(Pulling::request(pair.b(), from));
  CHECK(code_of([&] { kvpool::wait_on(*without.pool(), *fetch, engine.handle()); }) == ErrorCode::kArgument);
  CHECK_FALSE(Pulling::end_of(*fetch));
}

TEST_CASE("a wait that finds the GPU lost says so, and so does the pool") {
  Pulling pair("sock");
  const EngineStream owners(pair.cuda(), 1);
  const EngineStream engine(pair.cuda());
  const Addresses from = alloc_stamped(*pair.b().pool(), 1, 10);
  Gate gate(owners);
  const auto fetch = pair.fetch(from);
  pair.cuda().fail("cuStreamWaitValue32", 719);
  CHECK(code_of([&] { pair.wait_on(*fetch, engine); }) == ErrorCode::kDeviceLost);
  CHECK(code_of([&] { alloc(*pair.a().pool(), 1); }) == ErrorCode::kDeviceLost);
}

TEST_CASE("calls that would wait for a stream that waits for a peer are refused, unless they name a stream") {
  for (const int version : {13000, 12040}) {  // with and without events of a whole device
    CAPTURE(version);
    Pulling pair("sock", 1, version);
    const EngineStream owners(pair.cuda(), 2);
    const EngineStream engine(pair.cuda());
    const EngineStream other(pair.cuda());
    Pool& pool = *pair.a().pool();
    const Addresses from = alloc_stamped(*pair.c().pool(), 1, 10);
    const Addresses own = alloc_stamped(pool, 2, 30);
    const auto send = [&](const EngineStream* after) {
      TransferRequest request;
      request.from = own;
      request.deadline_ns = real_seconds(kLong);
      if (after != nullptr) request.after = pool.order_after(after->handle());
      return pair.a().transfer(std::move(request));
    };
    Gate gate(owners);
    const auto fetch = pair.a().service().fetch(Pulling::request(pair.c(), from));
    pair.wait_on(*fetch, engine);
    const auto pulled = pair.b().service().fetch(Pulling::request(pair.a(), own));
    const auto sent = send(nullptr);
    CHECK(pair.end_of(*pulled) == ErrorCode::kBusy);
    CHECK(pair.end_of(*sent) == ErrorCode::kBusy);
    CHECK_FALSE(pair.end_of(*send(&other)));
    CHECK_FALSE(fetch->done());
    gate.open();
    CHECK_FALSE(pair.end_of(*fetch));
    engine.wait();
    CHECK_FALSE(pair.end_of(*send(nullptr)));
    CHECK_FALSE(Pulling::end_of(*pair.b().service().fetch(Pulling::request(pair.a(), own))));
  }
}

TEST_CASE("content that the GPU queues behind the stream that waits for it arrives, and the fetch fails") {
  Pulling pair("sock");
  const EngineStream owners(pair.cuda(), 1);
  const EngineStream engine(pair.cuda());
  const Addresses from = alloc_stamped(*pair.b().pool(), 3, 10);
  const Addresses to = alloc(*pair.a().pool(), 3);
  pair.cuda().set("one_queue", 1);
  Gate gate(owners);
  const auto fetch = pair.fetch(from, to);
  pair.wait_on(*fetch, engine);
  gate.open();
  std::string text;
  REQUIRE(fetch->wait(real_seconds(kLong)));
  CHECK(code_of([&] { fetch->rethrow_if_failed(); }, &text) == ErrorCode::kUnsupported);
  CHECK(text.find("queue") != std::string::npos);
  engine.wait();
  CHECK(are_stamped(*pair.a().pool(), to, 10));
  CHECK(pair.a().count(BlockState::kActive) == 3);
}

TEST_CASE("streams can wait for thousands of fetches, one after the other") {
  Pulling pair("sock", -1);
  pair.cuda().set("delay_us", 0);
  Pool& pool = *pair.a().pool();
  const EngineStream engine(pair.cuda());
  constexpr std::size_t kFetches = 2000;
  constexpr std::size_t kBlocks = 8;
  const Addresses from = alloc_stamped(*pair.b().pool(), kBlocks, 10);
  const Addresses to = alloc(pool, kBlocks);
  std::atomic<std::size_t> right{0};
  for (std::size_t i = 0; i < kFetches; ++i) {
    const std::size_t at = i % kBlocks;
    const auto fetch = pair.fetch({from[at]}, {to[at]});
    pair.wait_on(*fetch, engine);
    engine.run([&, at] { right += has_stamp(pool, to[at], 10 + at) ? 1 : 0; });
    if (at + 1 == kBlocks) engine.wait();  // before they are written again
    CHECK_FALSE(pair.end_of(*fetch));
  }
  engine.wait();
  CHECK(right == kFetches);
  CHECK(pair.cuda().count("waits passed") > 0);
}

TEST_CASE("streams begin to wait in many threads while the fetch ends") {
  Pulling pair("sock", -1);
  pair.cuda().set("delay_us", 0);
  Pool& pool = *pair.a().pool();
  const Addresses from = alloc_stamped(*pair.b().pool(), 2, 10);
  std::vector<std::unique_ptr<EngineStream>> engines;
  for (int i = 0; i < 3; ++i) engines.push_back(std::make_unique<EngineStream>(pair.cuda()));
  for (int round = 0; round < 100; ++round) {
    const bool cancels = round % 4 == 3;
    const auto fetch = pair.fetch(from);
    const Addresses to = fetch->addresses();
    std::atomic<int> ran{0};
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (const auto& engine : engines) {
      threads.emplace_back([&] {
        if (code_of([&] { pair.wait_on(*fetch, *engine); })) return;
        engine->run([&] {
          ++ran;
          if (!fetch->done() || (!cancels && !are_stamped(pool, to, 10))) ++wrong;
        });
      });
    }
    if (cancels) fetch->cancel();
    for (std::thread& thread : threads) thread.join();
    for (const auto& engine : engines) engine->wait();
    CHECK(wrong == 0);
    const auto code = pair.end_of(*fetch);
    if (!code) {
      CHECK(ran == 3);
      free_all(pool, to);
    } else {
      CHECK(*code == ErrorCode::kCancelled);
    }
  }
  CHECK(eventually([&] { return pair.a().count(BlockState::kFree) == 32; }));
}

}  // namespace
}  // namespace kvpool::testing

#endif  // KVPOOL_FAKE_CUDA
