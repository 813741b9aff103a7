#include "kvpool/routes/nccl/nccl_route.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <new>
#include <optional>
#include <string>
#include <utility>

#include "kvpool/base/clock.h"
#include "kvpool/net/data_body.h"
#include "kvpool/net/reactor.h"
#include "kvpool/routes/route_choice.h"
#include "kvpool/routes/route_cost.h"
#include "kvpool/routes/write_in_parts.h"
#include "kvpool/routes/write_timer.h"

namespace kvpool {
namespace {

// A guess: nobody has measured it. Writes correct it.
constexpr RoutePrior kNcclPrior{100, 0.02, 1 / 20e3};
constexpr auto kLook = std::chrono::milliseconds(5);
constexpr std::int64_t kNsPerMs = 1'000'000;
constexpr std::int64_t kHaltNs = 10'000'000'000;
constexpr std::int64_t kStallNs = 1'000'000'000;

// Pieces that both sides may well have in one run are a message each; else all is one, and gathered.
std::uint64_t message_bytes_of(const TransferPart& part) noexcept {
  const std::uint64_t bytes = part.bytes();
  if (part.strips.size() != 1) return bytes;
  const std::uint64_t piece = part.strips.front().bytes;
  return piece >= kNcclMessageBytesMin && part.blocks <= kNcclMessagesMax ? piece : bytes;
}

// What the session sees: passes that arrive go to the inbox, answers to passes from here to the route.
class NcclReceiver final : public RouteReceiver {
 public:
  NcclReceiver(std::shared_ptr<NcclInbox> inbox, std::function<void(std::uint64_t id, const NcclPassedBody&)> on_passed)
      : inbox_(std::move(inbox)), on_passed_(std::move(on_passed)) {}
  void begin(Admit admit, Placed placed, Lost lost) override {
    inbox_->begin(std::move(admit), std::move(placed), std::move(lost));
  }
  void on_message(Message&& message) override {
    if (message.kind != FrameKind::kPassed) return inbox_->on_message(std::move(message));
    on_passed_(message.id, read_passed(message.body));
  }
  bool defer(std::function<void()>& work) override { return inbox_->defer(work); }
  void close(std::function<void()> on_closed) noexcept override { inbox_->close(std::move(on_closed)); }
  void stop() noexcept { inbox_->stop(); }

 private:
  const std::shared_ptr<NcclInbox> inbox_;
  const std::function<void(std::uint64_t id, const NcclPassedBody&)> on_passed_;
};

// Answers, as they come in. Shared by the route and the route receiver, which live for different times.
class Answers {
 public:
  void on_passed(std::uint64_t id, const NcclPassedBody& body) {
    const std::lock_guard lock(mutex_);
    if (body.number == 0) {
      unmade_ = id;
      unmade_for_good_ = body.outcome == NcclOutcome::kUnable;
      why_unmade_ = body.why;
      return;
    }
    if (body.number != expected_ || answer_) {
      throw Error(ErrorCode::kProtocol, "the peer tells of content that was not sent to it");
    }
    answer_ = body;
    changed_.notify_all();
  }
  void expect(std::uint64_t number) {
    const std::lock_guard lock(mutex_);
    expected_ = number;
    answer_.reset();
  }
  std::optional<NcclPassedBody> get() {
    const std::lock_guard lock(mutex_);
    return answer_;
  }
  // Throws when the peer has said that it cannot make its side of this communicator.
  void throw_if_unmade(std::uint64_t generation) {
    const std::lock_guard lock(mutex_);
    if (unmade_ != generation) return;
    throw Error(unmade_for_good_ ? ErrorCode::kUnsupported : ErrorCode::kRouteFailed,
                "the peer cannot receive by NCCL: " + why_unmade_);
  }
  // For a while, or until there is one.
  void wait() {
    std::unique_lock lock(mutex_);
    if (!answer_) changed_.wait_for(lock, kLook);
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t expected_ = 0;
  std::optional<NcclPassedBody> answer_;
  std::uint64_t unmade_ = 0;
  bool unmade_for_good_ = false;
  std::string why_unmade_;
};

class NcclRoute final : public Route {
 public:
  NcclRoute(const NcclMemory& memory, const std::shared_ptr<Link>& link, RouteRun run)
      : local_(memory.local),
        limits_(memory.limits),
        link_(link),
        run_(std::move(run)),
        answers_(std::make_shared<Answers>()),
        route_receiver_(std::make_shared<NcclReceiver>(
            std::make_shared<NcclInbox>(memory, link, run_),
            [answers = answers_](std::uint64_t id, const NcclPassedBody& body) { answers->on_passed(id, body); })),
        pipe_(std::make_shared<NcclPipe>(memory, NcclWay::kSend)) {}
  // The thread that reads all links may drop it, and NCCL's abort waits for the GPU, as freeing its memory does.
  ~NcclRoute() override {
    if (pipe_->is_empty()) return;
    try {
      run_(this, [pipe = std::move(pipe_)] { pipe->let_go(); });
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): no memory: the pipe has gone here
    }
  }
  NcclRoute(const NcclRoute&) = delete;
  NcclRoute& operator=(const NcclRoute&) = delete;

  const char* name() const noexcept override { return "nccl"; }
  // It waits for the GPU, and for the peer's: never in a caller's thread.
  RouteTraits traits() const noexcept override {
    return {.one_sided = false, .by_caller = false, .waits = true, .whole = false};
  }
  double estimate_us(const MediaSet& from, const MediaSet& to, const WriteSize& size,
                     std::int64_t now_ns) const noexcept override {
    return cost_.estimate_us(from, to, size, now_ns);
  }
  RouteCost* cost() noexcept override { return &cost_; }
  std::shared_ptr<RouteReceiver> route_receiver() const noexcept override { return route_receiver_; }
  void close() noexcept override {
    closed_.store(true, std::memory_order_relaxed);
    route_receiver_->stop();
  }

  WriteOutcome write(const WriteRequest& request) override {
    if (request.from.size() != request.to.size() || !blocks_exist(request.from, local_)) {
      throw Error(ErrorCode::kArgument, "a block to write from does not exist, or the nccl route does not reach it");
    }
    const Turn turn(*this, request);
    WriteTimer timer(cost_, request);
    const TransferParts parts(request.strips, request.from.size(),
                              PartLimits{.bytes_max = limits_.pass_bytes,
                                         .blocks_max = kDataBlocksMax,
                                         .strips_max = kDataRangesMax,
                                         .pieces_max = kDataPiecesMax});
    WriteOutcome outcome;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      throw_if_stopped(request, name(), closed_);
      const std::uint64_t bytes = parts[i].bytes();
      outcome.calls += send(request, parts[i]);
      outcome.bytes += bytes;
      if (request.bytes_done != nullptr) request.bytes_done->fetch_add(bytes, std::memory_order_relaxed);
    }
    // By the plan: a strip of a block that takes several passes is one message.
    outcome.calls = std::min<std::uint64_t>(outcome.calls, request.strips.size() * request.from.size());
    outcome.pieces = outcome.calls;
    timer.stop(outcome);
    return outcome;
  }

 private:
  // One write at a time: a write waits for its turn under the same limits as for the peer.
  class Turn {
   public:
    Turn(NcclRoute& route, const WriteRequest& request) : route_(route) {
      std::unique_lock lock(route.turn_mutex_);
      while (route.taken_) {
        throw_if_stopped(request, route.name(), route.closed_);
        route.turn_changed_.wait_for(lock, kLook);
      }
      route.taken_ = true;
    }
    ~Turn() {
      const std::lock_guard lock(route_.turn_mutex_);
      route_.taken_ = false;
      route_.turn_changed_.notify_one();
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    NcclRoute& route_;
  };

  void tell(FrameKind kind, std::uint64_t id, Bytes&& body) const {
    const auto link = link_.lock();
    if (link == nullptr) throw Error(ErrorCode::kPeerLost, "the link to the peer has ended");
    link->send(Message{kind, 0, id, std::move(body)});
  }

  // Returns how many messages it was.
  std::uint64_t send(const WriteRequest& request, const TransferPart& part) {
    bool announced = false;
    const std::int64_t began_ns = monotonic_ns();
    try {
      if (!pipe_->is_open()) open(request);
      NcclPassBody pass;
      pass.generation = generation_;
      pass.number = number_ + 1;
      pass.lifetime_ms =
          static_cast<std::uint64_t>(std::max<std::int64_t>(request.deadline_ns - monotonic_ns(), 0) / kNsPerMs) + 1;
      pass.bytes = part.bytes();
      pass.message_bytes = message_bytes_of(part);
      const auto to = request.to.subspan(part.first_block, part.blocks);
      write_data_body(part.strips, to, pass.data);
      answers_->expect(pass.number);
      tell(FrameKind::kPass, request.transfer, write_body(pass));
      announced = true;
      number_ = pass.number;
      std::vector<ContentRange> ranges;
      for (const BlockStrip& strip : part.strips) ranges.push_back({strip.from, strip.bytes});
      pipe_->pass({ranges, request.from.subspan(part.first_block, part.blocks), pass.bytes, pass.message_bytes},
                  [&] { check(request); });
      while (!answers_->get()) {
        throw_if_stopped(request, name(), closed_);
        answers_->wait();
      }
      throw_if_refused();
      return (pass.bytes + pass.message_bytes - 1) / pass.message_bytes;
    } catch (const std::exception& failure) {
      const auto* const error = dynamic_cast<const Error*>(&failure);
      if (error != nullptr && is_late(*error, request)) note_stall(began_ns);
      const bool device_lost = error != nullptr && error->code() == ErrorCode::kDeviceLost;  // which says no less
      if (halt(announced) || device_lost) throw;
      throw Error(ErrorCode::kPeerLost, "the peer does not say that it has stopped receiving by NCCL");
    }
  }

  // The transfer's own timer may have cancelled the write before it looked at the time itself.
  static bool is_late(const Error& error, const WriteRequest& request) noexcept {
    return error.code() == ErrorCode::kDeadline ||
           (error.code() == ErrorCode::kCancelled && monotonic_ns() >= request.deadline_ns);
  }

  // A pass that has come to a stand ends at the caller's deadline, which is nobody's fault in general. But one that
  // takes a thousand times what it should would take the next transfer with it, too: others are to serve.
  void note_stall(std::int64_t began_ns) noexcept {
    const std::int64_t now_ns = monotonic_ns();
    if (now_ns - began_ns < kStallNs) return;
    try {
      health().failed(Error(ErrorCode::kRouteFailed, "a pass by NCCL had not ended after " +
                                                         std::to_string((now_ns - began_ns) / kNsPerMs) +
                                                         " ms, at the transfer's deadline"),
                      began_ns, now_ns);
    } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): then it is as cheap as before
    }
  }

  void open(const WriteRequest& request) {
    NcclChannelBody channel;
    channel.generation = ++generation_;
    channel.pass_bytes = limits_.pass_bytes;
    channel.id = pipe_->make_id();
    tell(FrameKind::kChannel, 0, write_body(channel));
    const std::int64_t until_ns = monotonic_ns() + limits_.init_ns;
    pipe_->open(channel.id, channel.pass_bytes, [&] {
      throw_if_stopped(request, name(), closed_);
      answers_->throw_if_unmade(channel.generation);
      if (monotonic_ns() < until_ns) return;
      throw Error(ErrorCode::kRouteFailed, "a communicator of NCCL was not complete within " +
                                               std::to_string(limits_.init_ns / kNsPerMs) + " ms");
    });
  }

  void check(const WriteRequest& request) const {
    throw_if_stopped(request, name(), closed_);
    throw_if_refused();
  }

  void throw_if_refused() const {
    const auto answer = answers_->get();
    if (!answer || answer->outcome == NcclOutcome::kPlaced) return;
    if (answer->outcome == NcclOutcome::kRefused) {
      throw Error(ErrorCode::kNotOwner, "the peer refuses the content: " + answer->why);
    }
    throw Error(answer->outcome == NcclOutcome::kUnable ? ErrorCode::kUnsupported : ErrorCode::kRouteFailed,
                "the peer did not receive the content: " + answer->why);
  }

  // Leaves the communicator, and returns true when the peer has, too: what it has under way is written by nobody any
  // more. False when the peer does not say so: it is not heard any more, or its GPU hangs.
  bool halt(bool announced) {
    pipe_->shut();
    try {
      tell(FrameKind::kHalt, 0, write_halt(generation_));
    } catch (const std::exception&) {
      if (const auto link = link_.lock()) link->close(Error(ErrorCode::kPeerLost, "the peer cannot be told to stop"));
      return !announced || answers_->get().has_value();
    }
    const std::int64_t until_ns = monotonic_ns() + kHaltNs;
    while (announced && !answers_->get()) {
      if (closed_.load(std::memory_order_relaxed) || monotonic_ns() >= until_ns) return false;
      answers_->wait();
    }
    return true;
  }

  const MediaSpans local_;
  const NcclLimits limits_;
  const std::weak_ptr<Link> link_;
  const RouteRun run_;
  const std::shared_ptr<Answers> answers_;
  const std::shared_ptr<NcclReceiver> route_receiver_;
  RouteCost cost_{kNcclPrior};
  std::atomic<bool> closed_{false};
  std::mutex turn_mutex_;
  std::condition_variable turn_changed_;
  bool taken_ = false;

  std::shared_ptr<NcclPipe> pipe_;  // these are whose turn it is
  std::uint64_t generation_ = 0;
  std::uint64_t number_ = 0;
};

}  // namespace

std::shared_ptr<Route> make_nccl_route(const NcclMemory& memory, const std::shared_ptr<Link>& link, RouteRun run) {
  return std::make_shared<NcclRoute>(memory, link, std::move(run));
}

}  // namespace kvpool
