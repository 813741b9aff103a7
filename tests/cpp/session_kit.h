// A session whose peer is a script: a real pool, a link that notes what is sent, a host that follows the test and
// when, and a clock that a test moves.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kvpool/net/data_body.h"
#include "kvpool/peers/peer_blocks.h"
#include "kvpool/peers/received_queue.h"
#include "kvpool/transfer/messages.h"
#include "kvpool/transfer/session.h"
#include "pool_fixture.h"
#include "thrown.h"

namespace kvpool::testing {

inline constexpr std::int64_t kMs = 1'000'000;
inline constexpr std::uint32_t kOwnInstance = 7;
inline constexpr std::uint32_t kPeerInstance = 9;
inline constexpr std::uint64_t kPeerIncarnation = 0x1234567;
inline constexpr std::uint32_t kPeerBlocks = 32;

// What an owner says of a fetch that it has written.
inline Bytes fetched(std::optional<std::uint32_t> checksum = std::nullopt) {
  return write_body(FetchedBody{"script", 3, 2000, checksum});
}

// What the peer was sent, and what it does while a thread waits.
class ScriptLink final : public Link {
 public:
  void send(Message&& message) override {
    if (closed) throw Error(ErrorCode::kPeerLost, "closed");
    if (busy) throw Error(ErrorCode::kBusy, "too much is queued");
    sent.push_back(std::move(message));
    if (const auto peer = std::exchange(at_once, nullptr)) peer();
  }
  void send_data(std::uint64_t, std::span<const std::byte>, std::span<const iovec>, std::int64_t,
                 const std::atomic<bool>*) override {}
  bool drive(std::int64_t deadline_ns, const std::function<bool()>& done) override {
    if (meanwhile) meanwhile(deadline_ns);
    return done();
  }
  void wake() noexcept override {}
  int descriptor(std::size_t) const noexcept override { return -1; }
  int pidfd() const noexcept override { return -1; }
  std::string describe() const override { return "script"; }
  std::int64_t process() const noexcept override { return pid; }
  std::shared_ptr<void> attachment() const override { return attached; }
  void close(const Error& error) noexcept override {
    if (!std::exchange(closed, true)) why = error.code();
  }

  // The only message since the last look.
  Message take() {
    KVPOOL_CHECK(sent.size() == 1);
    Message message = std::move(sent.front());
    sent.clear();
    return message;
  }

  std::vector<Message> sent;
  std::function<void(std::int64_t deadline_ns)> meanwhile;
  std::function<void()> at_once;  // what the peer does about the next message, before send() has returned
  bool closed = false;
  bool busy = false;
  std::int64_t pid = 0;
  std::shared_ptr<void> attached;
  ErrorCode why = ErrorCode::kArgument;
};

// Writes nothing: the test says when a write has ended, and how.
class ScriptRoute final : public Route {
 public:
  explicit ScriptRoute(bool one_sided) : one_sided_(one_sided) {}
  const char* name() const noexcept override { return "script"; }
  RouteTraits traits() const noexcept override { return {.one_sided = one_sided_, .by_caller = true, .waits = false}; }
  bool reaches(Medium medium) const noexcept override { return medium == Medium::kHbm || reaches_dram; }
  bool ready(const MediaSet&, const MediaSet&) noexcept override {
    if (when_asked) when_asked();
    return true;
  }
  double estimate_us(const MediaSet&, const MediaSet&, const WriteSize& size, std::int64_t) const noexcept override {
    estimated = size;
    return 1;
  }
  WriteOutcome write(const WriteRequest&) override { return {}; }
  void close() noexcept override { closed = true; }
  std::shared_ptr<RouteReceiver> route_receiver() const noexcept override { return route_receiver_of; }
  std::shared_ptr<RouteReceiver> route_receiver_of;
  std::function<void()> when_asked;  // whether it is ready
  mutable WriteSize estimated;
  bool reaches_dram = true;
  bool closed = false;

 private:
  const bool one_sided_;
};

class ScriptHost final : public SessionHost {
 public:
  explicit ScriptHost(BlockHost& blocks) : blocks_(blocks) {}
  BlockHost& blocks() noexcept override { return blocks_; }
  std::int64_t now_ns() const noexcept override { return now; }
  const SessionLimits& limits() const noexcept override { return limits_of; }
  TransferTally& tally() noexcept override { return tally_of; }
  void run(const void*, std::function<void()> work) override { works.push_back(std::move(work)); }
  void write(WriteJob&& job) override {
    if (!writes_at_once) return writes.push_back(std::move(job));
    const auto here = reinterpret_cast<std::uintptr_t>(__builtin_frame_address(0));
    stack_low = std::min(stack_low, here);
    stack_high = std::max(stack_high, here);
    job.done({1, job.bytes}, nullptr);
  }
  void drained(Session&) noexcept override { ++drained_calls; }
  void recalled(Session&, const std::vector<Address>& addresses, std::int64_t deadline_ns) noexcept override {
    recalls.emplace_back(addresses, deadline_ns);
  }
  void tick_by(std::int64_t at_ns) override {
    tick_at = at_ns;
    if (const auto first = std::exchange(when_asked_to_tick, nullptr)) first();
  }
  std::function<void()> when_asked_to_tick;  // once: what another thread does just then

  void run_works() {
    for (const auto& work : std::exchange(works, {})) work();
  }
  // The first write that is under way has ended.
  void end_write(const Error* error = nullptr) {
    WriteJob job = std::move(writes.front());
    writes.erase(writes.begin());
    job.done({1, error == nullptr ? job.bytes : 0}, error);
  }

  std::int64_t now = 1'000'000'000;
  std::int64_t tick_at = 0;
  SessionLimits limits_of;
  TransferTally tally_of;
  std::vector<std::function<void()>> works;
  std::vector<WriteJob> writes;
  int drained_calls = 0;
  std::vector<std::pair<std::vector<Address>, std::int64_t>> recalls;  // blocks and deadline
  bool writes_at_once = false;  // in the thread that gives the write, as a short one is
  std::uintptr_t stack_low = UINTPTR_MAX;
  std::uintptr_t stack_high = 0;

 private:
  BlockHost& blocks_;
};

class SessionKit {
 public:
  explicit SessionKit(bool one_sided = true, std::uint32_t hbm_blocks = 16, std::uint32_t received_max = 4,
                      std::size_t pieces = 2)
      : SessionKit(std::make_shared<Pool>(options_of(hbm_blocks, pieces)), one_sided, received_max) {}
  SessionKit(std::shared_ptr<Pool> of_pool, bool one_sided, std::uint32_t received_max = 4)
      : pool(std::move(of_pool)),
        received(received_max),
        peer_blocks(*pool, received),
        host(peer_blocks),
        link(std::make_shared<ScriptLink>()),
        route(std::make_shared<ScriptRoute>(one_sided)) {
    pool->set_instance(kOwnInstance);
    PeerMetadata metadata;
    metadata.name = "peer";
    metadata.instance = kPeerInstance;
    metadata.incarnation = kPeerIncarnation;
    metadata.media[Medium::kHbm].blocks = metadata.media[Medium::kDram].blocks = kPeerBlocks;
    session = std::make_shared<Session>(host, metadata, one_sided);
    session->start(link, {route});
  }
  ~SessionKit() {
    if (!session->link_ended()) session->on_closed(Error(ErrorCode::kPeerLost, "the test ends"));
    while (!host.writes.empty()) {
      const Error error(ErrorCode::kPeerLost, "the test ends");
      host.end_write(&error);
    }
  }
  SessionKit(const SessionKit&) = delete;
  SessionKit& operator=(const SessionKit&) = delete;

  static PoolOptions options_of(std::uint32_t hbm_blocks, std::size_t pieces) {
    PoolOptions options = small_options(hbm_blocks, 8);
    options.layout.piece_bytes.assign(pieces, 64);
    return options;
  }
  std::uint32_t count(BlockState state, Medium medium = Medium::kHbm) {
    const PoolStats stats = pool->audit();
    return stats.media[medium].by_state[static_cast<std::size_t>(state)];
  }

  // --- the peer's side of the script ---
  void say(FrameKind kind, std::uint64_t id, Bytes body = {}) {
    session->on_message(Message{kind, 0, id, std::move(body)});
  }
  void ask(const Verb& verb, std::uint64_t id, Bytes request = {}, std::uint32_t lifetime_ms = 0) {
    session->on_message(Message{FrameKind::kCall, verb.number, id, std::move(request), lifetime_ms});
  }
  void cancel(const Verb& verb, std::uint64_t id) {
    session->on_message(Message{FrameKind::kCancel, verb.number, id, {}});
  }
  void reply(const Verb& verb, std::uint64_t id, Bytes answer = {}) {
    session->on_message(Message{FrameKind::kAnswer, verb.number, id, std::move(answer)});
  }
  void refuse(const Verb& verb, std::uint64_t id, const Error& why) {
    session->on_message(Message{FrameKind::kRefused, verb.number, id, write_error(why)});
  }
  // Takes the only call since the last look, which has to be one of this verb, and answers it.
  void reply_next(const Verb& verb, Bytes answer = {}) { reply(verb, take(verb).id, std::move(answer)); }
  // The only message since the last look. REQUIRES: it is a call of this verb.
  Message take(const Verb& verb) {
    Message message = link->take();
    KVPOOL_CHECK(message.kind == FrameKind::kCall && message.verb == verb.number);
    return message;
  }
  Message answer() { return link->take(); }
  ErrorCode refusal() {
    const Message message = link->take();
    KVPOOL_CHECK(message.kind == FrameKind::kRefused);
    return read_error(message.body).code();
  }
  static ReserveBody reservation(std::uint32_t blocks) {
    ReserveBody body;
    body.blocks = blocks;
    body.may_evict = false;
    body.one_sided = true;
    body.lifetime_ms = 1000;
    return body;
  }
  Addresses reserve(std::uint64_t id, const ReserveBody& body) {
    ask(kReserveVerb, id, write_body(body));
    const Message message = answer();
    KVPOOL_CHECK(message.kind == FrameKind::kAnswer && message.verb == kReserveVerb.number);
    return read_reserved(message.body).addresses;
  }
  Addresses lend(std::uint64_t id, std::uint32_t blocks) {
    ask(kLendVerb, id, write_body(LendBody{blocks, Medium::kHbm, false}));
    const Message message = answer();
    KVPOOL_CHECK(message.kind == FrameKind::kAnswer && message.verb == kLendVerb.number);
    return read_addresses(message.body);
  }
  std::uint64_t bytes_of(std::size_t blocks) const { return blocks * pool->layout().block_bytes(); }
  CompleteBody completion(std::size_t blocks) const {
    CompleteBody body;
    body.bytes = bytes_of(blocks);
    body.has_private = true;
    body.private_bytes = Bytes(3, std::byte{5});
    return body;
  }
  Placement data(std::uint64_t id, const Addresses& to) {
    Bytes body;
    const BlockStrip strip{0, 0, pool->layout().block_bytes()};
    write_data_body({&strip, 1}, to, body);
    return session->on_data(id, body, bytes_of(to.size()));
  }
  // Data that arrives whole. False when it was dropped.
  bool place(std::uint64_t id, const Addresses& to, bool intact = true) {
    const Placement placement = data(id, to);
    if (placement.pieces.empty()) return false;
    session->on_placed(placement.token, intact);
    return true;
  }
  static Addresses peer_addresses(std::size_t n, std::uint32_t first = 0) {
    Addresses addresses;
    for (std::uint32_t i = 0; i < n; ++i) addresses.push_back(make_address(kPeerInstance, Medium::kHbm, 3, first + i));
    return addresses;
  }
  // This side has borrowed blocks of the peer.
  Addresses borrow(std::size_t n, std::uint32_t first = 0) {
    const Addresses addresses = peer_addresses(n, first);
    link->meanwhile = [this, addresses](std::int64_t) { reply_next(kLendVerb, write_addresses(addresses)); };
    const Addresses borrowed = session->borrow(n, Medium::kHbm, true, host.now + kMs);
    link->meanwhile = nullptr;
    return borrowed;
  }

  std::shared_ptr<Pool> pool;
  ReceivedQueue received;
  PeerBlocks peer_blocks;
  ScriptHost host;
  std::shared_ptr<ScriptLink> link;
  std::shared_ptr<ScriptRoute> route;
  std::shared_ptr<Session> session;
};

// How it has failed. REQUIRES: it has.
inline ErrorCode failure(const Transfer& transfer) {
  KVPOOL_CHECK(transfer.done());
  const auto code = code_of([&] { transfer.rethrow_if_failed(); });
  KVPOOL_CHECK(code.has_value());
  return *code;
}

}  // namespace kvpool::testing
