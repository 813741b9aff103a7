// The receiving half of the route nccl against a peer that breaks the protocol, and processes that are killed.
#include <doctest/doctest.h>
#include <signal.h>

#include <deque>
#include <thread>
#include <vector>

#include "child_process.h"
#include "kvpool/arena/device_arena.h"
#include "kvpool/net/data_body.h"
#include "kvpool/routes/nccl/nccl_inbox.h"
#include "nccl_pools.h"
#include "peer_process.h"
#include "session_kit.h"
#include "soon.h"

#ifdef KVPOOL_FAKE_CUDA

namespace kvpool::testing {
namespace {

constexpr std::uint32_t kArenaBlocks = 8;
constexpr std::size_t kPieceBytes = 256;

// An inbox that works when the test says so; the test is its peer.
class InboxTest {
 public:
  InboxTest() : arena_(DeviceArenaOptions{.blocks = kArenaBlocks, .segment_bytes = {kPieceBytes}}) {
    NcclMemory memory;
    memory.library = &load_nccl(fake_nccl_path());
    memory.context = arena_.context();
    memory.local[0] = {arena_.blocks(), arena_.segments()};
    spans_ = memory.local;
    inbox_ = std::make_shared<NcclInbox>(memory, link_, [this](const void*, std::function<void()> work) {
      if (const auto first = std::exchange(before_run, nullptr)) first();
      works_.push_back(std::move(work));
    });
    inbox_->begin(
        [this](std::uint64_t id, std::span<const std::byte> body, std::uint64_t bytes) {
          const DataBody data = read_data_body(body, bytes, spans_);
          Placement placement;
          if (admits) placement.pieces = data_placement(data, spans_);
          placement.token = id;
          return placement;
        },
        [this](std::uint64_t token, bool intact) { placed.emplace_back(token, intact); });
  }
  ~InboxTest() { run(); }

  void run() {
    while (!works_.empty()) run_one();
  }
  void run_one() {
    const auto work = std::move(works_.front());
    works_.pop_front();
    work();
  }
  static NcclPassBody pass(std::uint64_t number, std::uint64_t bytes = kPieceBytes) {
    NcclPassBody body;
    body.generation = 1;
    body.number = number;
    body.lifetime_ms = 30'000;
    body.bytes = bytes;
    body.message_bytes = bytes;
    const BlockStrip strip{0, 0, kPieceBytes};
    const Address to = make_address(1, Medium::kHbm, 0, 3);
    write_data_body({&strip, 1}, {&to, 1}, body.data);
    return body;
  }
  void say(FrameKind kind, Bytes body) { inbox_->on_message(Message{kind, 0, 17, std::move(body)}); }
  NcclPassedBody answer() {
    const Message message = link_->take();
    CHECK(message.kind == FrameKind::kPassed);
    CHECK(message.id == 17);
    return read_passed(message.body);
  }
  NcclInbox& inbox() { return *inbox_; }
  ScriptLink& link() { return *link_; }

  FakeCuda cuda;
  FakeNccl nccl;
  bool admits = true;
  std::function<void()> before_run;  // once: what another thread does while a thread is asked for
  std::vector<std::pair<std::uint64_t, bool>> placed;

 private:
  DeviceArena arena_;
  MediaSpans spans_;
  std::shared_ptr<ScriptLink> link_ = std::make_shared<ScriptLink>();
  std::deque<std::function<void()>> works_;
  std::shared_ptr<NcclInbox> inbox_;
};

TEST_CASE("nccl inbox: a message that does not fit is refused before anything is received") {
  InboxTest test;
  const auto code = [&](const NcclPassBody& body) {
    return code_of([&] { test.say(FrameKind::kPass, write_body(body)); });
  };
  CHECK(code(InboxTest::pass(1, kPieceBytes + 1)) == ErrorCode::kProtocol);  // more than the blocks take
  NcclPassBody none = InboxTest::pass(1);
  none.bytes = 0;
  CHECK(code(none) == ErrorCode::kProtocol);
  NcclPassBody much = InboxTest::pass(1);
  much.bytes = kNcclPassBytesMax + 1;
  CHECK(code(much) == ErrorCode::kProtocol);
  for (const std::uint64_t message_bytes : {std::uint64_t{0}, std::uint64_t{1}}) {  // 256 messages are too many
    NcclPassBody many = InboxTest::pass(1);
    many.message_bytes = message_bytes;
    CHECK(code(many) == ErrorCode::kProtocol);
  }
  NcclChannelBody channel;
  for (const std::uint64_t bytes : {std::uint64_t{0}, kNcclPassBytesMin - 1, kNcclPassBytesMax + 1}) {
    channel.pass_bytes = bytes;
    CHECK(code_of([&] { test.say(FrameKind::kChannel, write_body(channel)); }) == ErrorCode::kProtocol);
  }
  NcclPassBody cut = InboxTest::pass(1);
  cut.data.pop_back();
  CHECK(code(cut) == ErrorCode::kProtocol);
  CHECK(code(InboxTest::pass(7)) == ErrorCode::kProtocol);  // not the next one
  test.run();
  CHECK(test.placed.empty());
  CHECK(test.nccl.count("ncclRecv") == 0);
}

TEST_CASE("nccl inbox: every message is understood or refused") {
  InboxTest test;
  const Bytes good = write_body(InboxTest::pass(1));
  for (std::size_t bytes = 0; bytes < good.size(); ++bytes) {
    const Bytes cut(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(bytes));
    CHECK(code_of([&] { test.say(FrameKind::kPass, cut); }) == ErrorCode::kProtocol);
  }
  CHECK(code_of([&] { test.say(FrameKind::kChannel, Bytes(143)); }) == ErrorCode::kProtocol);
  CHECK(code_of([&] { test.say(FrameKind::kChannel, Bytes(145)); }) == ErrorCode::kProtocol);
  CHECK(code_of([&] { test.say(FrameKind::kHalt, Bytes(9)); }) == ErrorCode::kProtocol);
  CHECK(code_of([] { read_passed(Bytes(13, std::byte{9})); }) == ErrorCode::kProtocol);
}

TEST_CASE("nccl inbox: each pass is answered once, whether it was placed or not") {
  InboxTest test;
  test.say(FrameKind::kPass, write_body(InboxTest::pass(1)));  // into no communicator
  test.run();
  CHECK(test.answer().outcome == NcclOutcome::kFailed);
  CHECK(test.placed == std::vector<std::pair<std::uint64_t, bool>>{{17, false}});
  test.admits = false;
  test.say(FrameKind::kPass, write_body(InboxTest::pass(2)));
  test.run();
  const NcclPassedBody refused = test.answer();
  CHECK(refused.outcome == NcclOutcome::kRefused);
  CHECK(refused.number == 2);
  CHECK(test.placed.size() == 1);
}

TEST_CASE("nccl inbox: a pass longer than its sender has announced is refused") {
  InboxTest test;
  NcclChannelBody channel;
  channel.generation = 1;
  channel.pass_bytes = kNcclPassBytesMin;
  test.nccl.fail_nth(1, 2);  // it is not to wait for a peer
  test.say(FrameKind::kChannel, write_body(channel));
  NcclPassBody longer = InboxTest::pass(1);
  longer.bytes = longer.message_bytes = kNcclPassBytesMin + 1;
  std::string text;
  CHECK(code_of([&] { test.say(FrameKind::kPass, write_body(longer)); }, &text) == ErrorCode::kProtocol);
  CHECK_MESSAGE(text.find("were announced") != std::string::npos, text);
  test.run();
  const NcclPassedBody unmade = [&] {
    const Message message = test.link().take();
    return read_passed(message.body);
  }();
  CHECK(unmade.number == 0);
  CHECK(unmade.outcome == NcclOutcome::kFailed);  // NCCL's system error may be gone next time
}

TEST_CASE("nccl inbox: a peer that announces passes without waiting is disconnected, and its passes are answered") {
  InboxTest test;
  for (std::uint64_t number = 1; number <= kNcclPassesMax; ++number) {
    test.say(FrameKind::kPass, write_body(InboxTest::pass(number)));
  }
  const Bytes more = write_body(InboxTest::pass(kNcclPassesMax + 1));
  std::string text;
  CHECK(code_of([&] { test.say(FrameKind::kPass, more); }, &text) == ErrorCode::kProtocol);
  CHECK_MESSAGE(text.find("wait for their turn") != std::string::npos, text);
  test.run();
  CHECK(test.link().sent.size() == kNcclPassesMax);
  CHECK(test.placed.size() == kNcclPassesMax);
  test.say(FrameKind::kPass, more);  // there is room again
}

TEST_CASE("nccl inbox: of several communicators that are opened in turn, the last is joined") {
  InboxTest test;
  test.nccl.fail_nth(1, 2);  // it is not to wait for a peer
  NcclChannelBody channel;
  channel.pass_bytes = kNcclPassBytesMin;
  for (channel.generation = 1; channel.generation <= 1000; ++channel.generation) {
    test.say(FrameKind::kChannel, write_body(channel));
  }
  test.run();
  const Message unmade = test.link().take();
  CHECK(unmade.id == 1000);
  CHECK(read_passed(unmade.body).number == 0);
}

// Work that was deferred in between used to hide the one before, so that all of them were kept.
TEST_CASE("nccl inbox: a peer that opens communicators without end is disconnected") {
  InboxTest test;
  test.say(FrameKind::kPass, write_body(InboxTest::pass(1)));
  NcclChannelBody channel;
  channel.pass_bytes = kNcclPassBytesMin;
  const auto open = [&] {
    ++channel.generation;
    return code_of([&] { test.say(FrameKind::kChannel, write_body(channel)); });
  };
  for (std::size_t i = 0; i < kNcclChannelsMax; ++i) {
    REQUIRE_FALSE(open());
    std::function<void()> work = [] {};
    REQUIRE(test.inbox().defer(work));
  }
  CHECK(open() == ErrorCode::kProtocol);
  test.say(FrameKind::kHalt, write_halt(channel.generation));  // none of them is to wait for its sender
  test.run();
  CHECK_FALSE(open());  // there is room again
  test.say(FrameKind::kHalt, write_halt(channel.generation));
}

TEST_CASE("nccl inbox: between two pieces of work, other peers have their turn") {
  InboxTest test;
  for (std::uint64_t number = 1; number <= 3; ++number) {
    test.say(FrameKind::kPass, write_body(InboxTest::pass(number)));
  }
  for (std::size_t answered = 1; answered <= 3; ++answered) {
    test.run_one();
    REQUIRE(test.link().sent.size() == answered);
  }
}

TEST_CASE("nccl inbox: a communicator that can never be made is reported as such") {
  InboxTest test;
  NcclChannelBody channel;
  channel.generation = 1;
  channel.pass_bytes = kNcclPassBytesMax;  // more than the GPU has left
  test.cuda.set("memory_mib", 128);
  test.say(FrameKind::kChannel, write_body(channel));
  test.run();
  const Message message = test.link().take();
  const NcclPassedBody unable = read_passed(message.body);
  CHECK(unable.outcome == NcclOutcome::kUnable);
  CHECK_MESSAGE(unable.why.find("no room") != std::string::npos, unable.why);
  CHECK(test.nccl.count("ncclCommInitRankConfig") == 0);
}

TEST_CASE("nccl inbox: freeing blocks waits only for content that is arriving") {
  InboxTest test;
  int ran = 0;
  std::function<void()> work = [&] { ++ran; };
  CHECK_FALSE(test.inbox().defer(work));
  test.say(FrameKind::kPass, write_body(InboxTest::pass(1)));
  CHECK(test.inbox().defer(work));
  bool closed = false;
  test.inbox().close([&] {
    CHECK(ran == 1);
    closed = true;
  });
  CHECK(ran == 0);
  CHECK_FALSE(closed);
  test.run();
  CHECK(closed);
  bool again = false;
  test.inbox().close([&] { again = true; });
  test.run();
  CHECK(again);
}

TEST_CASE("nccl inbox: when no thread can be had for a pass, what was deferred behind it is done") {
  InboxTest test;
  int ran = 0;
  test.before_run = [&] {
    std::function<void()> work = [&] { ++ran; };
    CHECK(test.inbox().defer(work));
    throw std::bad_alloc();
  };
  CHECK_THROWS_AS(test.say(FrameKind::kPass, write_body(InboxTest::pass(1))), std::bad_alloc);
  CHECK(ran == 1);
  CHECK(test.placed == std::vector<std::pair<std::uint64_t, bool>>{{17, false}});
  CHECK(test.link().sent.empty());
  test.say(FrameKind::kPass, write_body(InboxTest::pass(2)));
  test.run();
  CHECK(test.answer().number == 2);
  CHECK(ran == 1);
}

TEST_CASE("nccl inbox: a halted sender or an ended link ends the waits for it") {
  for (const bool halts : {true, false}) {
    InboxTest test;
    NcclChannelBody channel;
    channel.generation = 1;
    channel.pass_bytes = kNcclPassBytesMin;
    channel.id.bytes[0] = 'x';  // nothing listens there
    test.say(FrameKind::kChannel, write_body(channel));
    test.say(FrameKind::kPass, write_body(InboxTest::pass(1)));
    std::thread peer([&] {
      sleep_while([&] { return test.nccl.count("ncclCommGetAsyncError") < 3; });
      if (halts) {
        test.say(FrameKind::kHalt, write_halt(1));
      } else {
        test.inbox().close([] {});
      }
    });
    test.run();
    peer.join();
    REQUIRE(test.link().sent.size() == (halts ? 2 : 0));
    if (halts) {
      CHECK(read_passed(test.link().sent[0].body).number == 0);  // of the communicator
      CHECK(test.link().sent[0].id == 1);
      CHECK(read_passed(test.link().sent[1].body).number == 1);
    }
    CHECK(test.placed == std::vector<std::pair<std::uint64_t, bool>>{{17, false}});
    CHECK(test.nccl.count("communicators") == 0);
  }
}

TEST_CASE("nccl inbox: an answer that cannot be sent ends the link") {
  InboxTest test;
  test.link().busy = true;
  test.say(FrameKind::kPass, write_body(InboxTest::pass(1)));
  test.run();
  CHECK(test.link().closed);
}

// ---- processes

TEST_CASE("nccl: either process is killed in the middle of a transfer") {
  if (!test::kChildMayStartThreads) return;
  for (const bool sender_dies : {true, false}) {
    const std::string address = "unix:@kvpool-nccl-kill-" + std::to_string(getpid()) + (sender_dies ? "-s" : "-r");
    PeerProcess other([&](const auto& wait) {
      FakeCuda cuda;
      FakeNccl nccl;
      NcclNode b = make_nccl_node("b", 1, /*aggregated=*/false);
      b.service->listen(address);
      if (!wait()) return 1;
      if (sender_dies) {
        nccl.set("stall", 1);
        const auto sent = b.service->transfer(NcclPair::request({nullptr, nullptr, nullptr, "a"}, alloc(*b.pool, 3)));
        wait();
      }
      wait();
      return 0;
    });
    FakeCuda cuda;
    FakeNccl nccl;
    NcclNode a = make_nccl_node("a", 0);
    REQUIRE(a.service->connect(address, {NcclPair::in(60), {}}) == "b");
    std::shared_ptr<Transfer> sent;
    if (!sender_dies) {
      nccl.set("stall", 1);
      sent = a.service->transfer(NcclPair::request({nullptr, nullptr, nullptr, "b"}, alloc(*a.pool, 3)));
    }
    other.go();
    REQUIRE(soon([&] { return nccl.count(sender_dies ? "ncclRecv" : "ncclSend") >= 1; }));
    CHECK(a.count(sender_dies ? BlockState::kReserved : BlockState::kActive) == 3);
    CHECK(other.kill_and_wait() == -SIGKILL);
    if (sent != nullptr) {
      const auto error = NcclPair::end_of(*sent);
      REQUIRE(error);
      CHECK(error->code() == ErrorCode::kPeerLost);
    }
    CHECK(soon([&] { return a.count(BlockState::kReserved) == 0; }));
    CHECK(soon([&] { return nccl.count("communicators") == 0; }));
    a.pool->close();
  }
}

}  // namespace
}  // namespace kvpool::testing

#endif  // KVPOOL_FAKE_CUDA
