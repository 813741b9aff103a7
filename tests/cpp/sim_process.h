// One incarnation of a simulated process: a real pool, the real sessions, and a host whose threads and clock are the
// simulator's.
#pragma once

#include <algorithm>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvpool/peers/peer_blocks.h"
#include "kvpool/peers/received_queue.h"
#include "kvpool/pool/pool.h"
#include "kvpool/sequences/attender.h"
#include "kvpool/transfer/peer_reads.h"
#include "kvpool/transfer/session.h"
#include "kvpool/views/lent_attends.h"
#include "kvpool/views/peer_views.h"
#include "pool_fixture.h"
#include "sim_clock.h"
#include "sim_route.h"

namespace kvpool::testing {

// Bugs that can be planted, to see that the checks find them. They are in what surrounds the sessions.
struct SimBugs {
  bool free_at_deadline = false;     // a reservation whose writer may still write is freed, not quarantined
  bool free_at_link_loss = false;    // the end of a link is taken for proof that a one-sided writer is gone
  bool forget_lost_peer = false;     // the receiving half does not hear that the link has ended
  bool keep_holds = false;           // blocks that were read are not let go
  bool no_holds = false;             // blocks are read without being held
  bool done_early = false;           // a write says that it is done before its last piece lies there
  bool keep_replays = false;         // the link hands on what it has handed on before
  bool unview_at_link_loss = false;  // the end of a link is taken for proof that a peer reads nothing any more
};

// Views that end with the link, although the peer may still read.
class SimForgetfulViews final : public PeerReads {
 public:
  explicit SimForgetfulViews(std::shared_ptr<PeerReads> views) : views_(std::move(views)) {}
  void serve(PeerCalls& calls) override { views_->serve(calls); }
  std::size_t on_recalled(std::span<const Address> addresses) noexcept override {
    return views_->on_recalled(addresses);
  }
  bool has_any() const noexcept override { return views_->has_any(); }
  void on_lost() noexcept override { views_->on_reader_gone(); }
  void on_reader_gone() noexcept override { views_->on_reader_gone(); }
  bool awaits_proof() const noexcept override { return views_->awaits_proof(); }

 private:
  const std::shared_ptr<PeerReads> views_;
};

// What a session may do with the pool, but for the bugs.
class SimBlocks final : public BlockHost {
 public:
  SimBlocks(PeerBlocks& blocks, const SimBugs& bugs) : blocks_(blocks), bugs_(bugs) {}

  const Layout& layout() const noexcept override { return blocks_.layout(); }
  std::uint32_t instance() const noexcept override { return blocks_.instance(); }
  std::optional<Reservation> reserve(const ReserveSpec& spec, Writer writer, Room room) override {
    return blocks_.reserve(spec, writer, room);
  }
  std::optional<std::vector<Address>> lend(std::size_t n, MediumChoice medium, Writer writer, Room room) override {
    return blocks_.lend(n, medium, writer, room);
  }
  void check_reserved(std::span<const Address> addresses, Writer writer) override {
    blocks_.check_reserved(addresses, writer);
  }
  void release(std::span<const Address> addresses) noexcept override {
    for (const Address address : addresses) {
      if (std::erase(freed_early_, address) == 0) blocks_.release({&address, 1});
    }
  }
  void quarantine(std::span<const Address> addresses) noexcept override {
    if (!bugs_.free_at_deadline) return blocks_.quarantine(addresses);
    blocks_.release(addresses);
    freed_early_.insert(freed_early_.end(), addresses.begin(), addresses.end());
  }
  Delivered deliver(Delivery&& delivery) override { return blocks_.deliver(std::move(delivery)); }
  void publish(std::unique_ptr<News> news) noexcept override { blocks_.publish(std::move(news)); }
  const MediaSpans& spans() const noexcept override { return blocks_.spans(); }
  std::uint32_t checksum(std::span<const Address> addresses) override { return blocks_.checksum(addresses); }
  void hold_for_reading(std::span<const Address> addresses, std::uint64_t for_incarnation) override {
    if (!bugs_.no_holds) blocks_.hold_for_reading(addresses, for_incarnation);
  }
  void release_reading(std::span<const Address> addresses) noexcept override {
    if (!bugs_.no_holds && !bugs_.keep_holds) blocks_.release_reading(addresses);
  }
  CachedPrefix match(std::string_view name_space, std::span<const Token> tokens) override {
    return blocks_.match(name_space, tokens);
  }
  StoredKeys match_keys(std::string_view cache, std::size_t key_bytes, std::span<const std::byte> keys,
                        bool every) override {
    return blocks_.match_keys(cache, key_bytes, keys, every);
  }
  void expect_writes(std::span<const Address> addresses, Writer writer) override {
    blocks_.expect_writes(addresses, writer);
  }
  void end_writes(std::span<const Address> addresses) noexcept override { blocks_.end_writes(addresses); }

 private:
  PeerBlocks& blocks_;
  const SimBugs& bugs_;
  std::vector<Address> freed_early_;
};

// Attention for peers on the simulator's clock: threads would follow no seed.
class SimAttends final : public LentAttends {
 public:
  static constexpr std::uint32_t kMost = 1;

  SimAttends(SimClock& clock, SimClock::Actor actor, Pool& pool, Attender& attender)
      : LentAttends(pool, attender, pool.executor(), kMost), clock_(clock), actor_(actor) {}

 private:
  static constexpr std::int64_t kSoonNs = 3'000'000;
  static constexpr std::int64_t kLateNs = 200'000'000;  // beyond most deadlines

  void run_later(std::uint64_t /*peer*/, Priority /*priority*/, Task work) override {
    SimDice& dice = clock_.dice();
    clock_.after(dice.between(0, dice.chance(400) ? kLateNs : kSoonNs), actor_, std::move(work));
  }
  std::int64_t stops_at_ns(const ServedCall& /*call*/) const noexcept override { return INT64_MAX; }

  SimClock& clock_;
  const SimClock::Actor actor_;
};

struct SimIdentity {
  std::string name;
  std::uint32_t instance = 0;
  std::uint64_t incarnation = 0;
  std::uint32_t hbm_blocks = 0;
  std::uint32_t dram_blocks = 0;
  bool aggregated = true;
  bool attendable = true;
};

class SimProcess final : public SessionHost {
 public:
  static constexpr std::uint32_t kReceivedMax = 6;
  static constexpr std::uint32_t kHeadDim = 8;
  static constexpr std::uint32_t kLayers = 2;

  // Two layers of one head. Attention can be computed if all pieces are as long as the format says; that others differ
  // in length is for transfers.
  static PoolOptions options(const SimIdentity& identity) {
    PoolOptions options = small_options(identity.hbm_blocks, identity.dram_blocks);
    constexpr std::uint64_t kPieceBytes = kPage * kHeadDim * sizeof(float);
    options.layout.piece_bytes = {kPieceBytes - 80, kPieceBytes - 48, kPieceBytes, kPieceBytes};
    if (identity.attendable) options.layout.piece_bytes.assign(std::size_t{2} * kLayers, kPieceBytes);
    options.layout.aggregated = identity.aggregated;
    options.layout.format = {1, kHeadDim, DType::kFloat32, false, false};
    options.check_memory = false;
    options.copy_threads = 1;
    options.first_generation = 1 + identity.instance;
    return options;
  }

  SimProcess(SimClock& clock, const SimBugs& bugs, const SimIdentity& identity,
             std::uint32_t received_max = kReceivedMax)
      : clock_(clock),
        bugs_(bugs),
        identity_(identity),
        actor_(clock.add_actor()),
        pool_(std::make_shared<Pool>(options(identity))),
        received_(received_max),
        peer_blocks_(*pool_, received_),
        blocks_(peer_blocks_, bugs),
        attender_(pool_->executor(), 1),
        lent_attends_(clock, actor_, *pool_, attender_) {
    pool_->set_instance(identity.instance);
    limits_.reserve_max_ns = 120'000'000;
    limits_.transfers_max = 12;
    limits_.reserved_max = 40;
  }

  Attender& attender() noexcept { return attender_; }
  void set_limits(const SessionLimits& limits) noexcept { limits_ = limits; }
  SimClock::Actor actor() const noexcept { return actor_; }
  const SimIdentity& identity() const noexcept { return identity_; }
  Pool& pool() noexcept { return *pool_; }
  const std::shared_ptr<Pool>& shared_pool() const noexcept { return pool_; }
  ReceivedQueue& received() noexcept { return received_; }
  bool alive() const noexcept { return clock_.alive(actor_); }
  bool able() const noexcept { return alive() && !clock_.paused(actor_); }

  PeerMetadata metadata() const {
    PeerMetadata metadata;
    metadata.name = identity_.name;
    metadata.instance = identity_.instance;
    metadata.incarnation = identity_.incarnation;
    metadata.media[Medium::kHbm].blocks = identity_.hbm_blocks;
    metadata.media[Medium::kDram].blocks = identity_.dram_blocks;
    return metadata;
  }
  void add_session(std::shared_ptr<Session> session) { sessions_.push_back(std::move(session)); }

  // --- SessionHost ---
  BlockHost& blocks() noexcept override { return blocks_; }
  std::int64_t now_ns() const noexcept override { return clock_.now_ns(); }
  const SessionLimits& limits() const noexcept override { return limits_; }
  TransferTally& tally() noexcept override { return tally_; }
  void run(const void* /*key*/, std::function<void()> work) override {
    clock_.after(clock_.dice().between(0, kWorkNs), actor_, std::move(work));
  }
  void write(WriteJob&& job) override {
    const auto work = std::make_shared<Writing>(Writing{std::move(job), {}});
    if (clock_.dice().chance(kInlinePerMille)) {
      while (write_some(*work)) {
      }
      return;
    }
    schedule(work);
  }
  void drained(Session& /*session*/) noexcept override {}
  std::shared_ptr<PeerReads> make_reads(const PeerMetadata& peer, bool by_mapping) override {
    auto views = std::make_shared<PeerViews>(*pool_, lent_attends_, peer.incarnation, by_mapping);
    if (!bugs_.unview_at_link_loss) return views;
    return std::make_shared<SimForgetfulViews>(std::move(views));
  }
  void recalled(Session& session, const std::vector<Address>& addresses,
                std::int64_t /*deadline_ns*/) noexcept override {
    if (on_recalled) on_recalled(session, addresses);
  }
  std::function<void(Session& session, const std::vector<Address>& addresses)> on_recalled;
  void tick_by(std::int64_t at_ns) override {
    if (at_ns >= next_tick_) return;
    next_tick_ = at_ns;
    clock_.at(at_ns, actor_, [this] { tick(); });
  }

 private:
  static constexpr std::int64_t kWorkNs = 300'000;
  static constexpr std::int64_t kStepNs = 20'000;
  static constexpr std::uint32_t kInlinePerMille = 150;
  struct Writing {
    WriteJob job;
    std::optional<SimWrite> write;
    bool told = false;
  };

  void schedule(const std::shared_ptr<Writing>& work) {
    clock_.after(clock_.dice().between(0, kStepNs), actor_, [this, work] {
      if (write_some(*work)) schedule(work);
    });
  }

  // False when it is over.
  bool write_some(Writing& work) {
    const auto finish = [&](const WriteOutcome& outcome, const Error* error) {
      if (!std::exchange(work.told, true)) std::exchange(work.job.done, nullptr)(outcome, error);
      return false;
    };
    try {
      if (!work.write) work.write.emplace(static_cast<const SimRoute&>(*work.job.route), work.job.request);
      if (work.write->step()) return finish(work.write->outcome(), nullptr);
      const WriteOutcome so_far = work.write->outcome();
      if (bugs_.done_early && so_far.bytes * 2 >= work.job.bytes) {
        work.job.request.cancelled = nullptr;
        finish({so_far.calls, work.job.bytes}, nullptr);
      }
      return true;
    } catch (const Error& error) {
      return finish(work.write ? work.write->outcome() : WriteOutcome{}, &error);
    }
  }

  void tick() {
    next_tick_ = std::numeric_limits<std::int64_t>::max();
    std::int64_t next = next_tick_;
    const std::vector<std::shared_ptr<Session>> sessions = sessions_;
    for (const auto& session : sessions) next = std::min(next, session->tick(now_ns()));
    if (next != std::numeric_limits<std::int64_t>::max()) tick_by(std::max(next, now_ns() + 1));
  }

  SimClock& clock_;
  const SimBugs& bugs_;
  const SimIdentity identity_;
  const SimClock::Actor actor_;
  const std::shared_ptr<Pool> pool_;
  ReceivedQueue received_;
  PeerBlocks peer_blocks_;
  SimBlocks blocks_;
  Attender attender_;
  SimAttends lent_attends_;
  SessionLimits limits_;
  TransferTally tally_;
  std::vector<std::shared_ptr<Session>> sessions_;
  std::int64_t next_tick_ = std::numeric_limits<std::int64_t>::max();
};

}  // namespace kvpool::testing
