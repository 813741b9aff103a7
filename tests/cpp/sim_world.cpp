// Processes, links and fate of the simulated world.
#include "sim_world.h"

#include "kvpool/pool/peer_claims.h"

namespace kvpool::testing {
namespace {

constexpr std::int64_t kMs = 1'000'000;
constexpr std::int64_t kLifeNs = 700 * kMs;
constexpr std::int64_t kMeetNs = 7 * kMs;

}  // namespace

// Between a link and its session.
class SimWorld::Watcher final : public LinkHandler {
 public:
  Watcher(SimWorld& world, Peering& peering) : world_(world), peering_(peering), session_(peering.session) {}
  void on_message(Message&& message) override { session_->on_message(std::move(message)); }
  Placement on_data(std::uint64_t id, std::span<const std::byte> body, std::uint64_t payload_bytes) override {
    return session_->on_data(id, body, payload_bytes);
  }
  void on_placed(std::uint64_t token, bool intact) override { session_->on_placed(token, intact); }
  void on_closed(const Error& why) override {
    if (why.code() == ErrorCode::kProtocol && !peering_.link->damaged() && !world_.plan_.bugs.keep_replays) {
      world_.fail(std::string("R1: an honest peer is taken for a liar: ") + why.what());
    }
    if (world_.plan_.bugs.forget_lost_peer) {
      session_->stop_writing(Error(ErrorCode::kPeerLost, why.what()));
    } else {
      session_->on_closed(why);
    }
    peering_.over = true;
    world_.count("links that ended");
  }

 private:
  SimWorld& world_;
  Peering& peering_;
  const std::shared_ptr<Session> session_;
};

SimWorld::SimWorld(const SimPlan& plan) : plan_(plan), clock_(plan.seed) {
  SimDice& dice = clock_.dice();
  watch_ = [this](const std::byte* at, std::size_t bytes, SimClock::Actor writer) {
    on_staging_buffer(at, bytes, writer);
  };
  const auto rate = [&](std::uint32_t most) {
    return dice.chance(500) ? 0 : static_cast<std::uint32_t>(dice.below(most));
  };
  faults_.lose = rate(40);
  faults_.reorder = rate(200);
  faults_.replay = rate(100);
  faults_.damage = rate(4);
  faults_.give_up = 500;
  faults_.busy = rate(3);
  faults_.abort = 300;
  faults_.lease_ns = 60 * kMs;
  faults_.resend_ns = 10 * kMs;
  faults_.delay_ns = dice.between(2'000, 400'000);
  faults_.delay_max_ns = dice.between(1, 8) * kMs;
  faults_.keep_replays = plan.bugs.keep_replays;
  if (plan.bugs.keep_replays) faults_.replay = 100;
  const std::uint64_t ways = dice.below(3);
  one_sided_ = ways != 0;
  placed_ = ways != 1;
  attendable_ = dice.chance(600);
  const std::uint32_t places = dice.chance(800) ? 2 : 3;
  now_.resize(places);
  for (std::uint32_t place = 0; place < places; ++place) start_process(place);
  end_ns_ = clock_.now_ns() + kLifeNs;
  plan_fates(plan.fates >= 0 ? plan.fates : static_cast<int>(dice.below(6)));
  meet_all();
}

SimWorld::~SimWorld() {
  clock_.clear();
  // Those that were killed have never ended anything: what holds each other lets go now.
  for (const auto& member : members_) {
    for (const auto& peering : member->peerings) {
      peering->link->detach();
      if (!peering->over) peering->session->on_closed(Error(ErrorCode::kClosed, "the world ends"));
    }
  }
}

void SimWorld::fail(const std::string& what) {
  if (!failure_.empty()) return;
  failure_ = what;
  clock_.log("FAILED");
}

SimWorld::Member& SimWorld::start_process(std::uint32_t place) {
  SimDice& dice = clock_.dice();
  SimIdentity identity;
  identity.name = std::string("p") + std::to_string(place);
  identity.instance = ++instances_;
  identity.incarnation = dice.any() | 1;
  identity.hbm_blocks = static_cast<std::uint32_t>(dice.between(12, 28));
  identity.dram_blocks = static_cast<std::uint32_t>(dice.chance(500) ? 0 : dice.between(4, 16));
  identity.aggregated = dice.chance(500);
  identity.attendable = attendable_;
  Member& member = *members_.emplace_back(std::make_unique<Member>());
  member.process = std::make_unique<SimProcess>(clock_, plan_.bugs, identity);
  member.process->on_recalled = [this, &member](const Session& session, const std::vector<Address>& addresses) {
    on_recalled(member, session, addresses);
  };
  now_[place] = &member;
  clock_.log("process", member.process->actor(), place);
  live_on(member);
  return member;
}

// --- meeting ---

SimWorld::Peering* SimWorld::live(Member& self, const Member& other) {
  for (const auto& peering : self.peerings) {
    if (peering->other == &other && !peering->over) return peering.get();
  }
  return nullptr;
}

// A process is met again only when what it wrote by earlier links has ended.
bool SimWorld::may_meet(Member& self, Member& other) {
  if (live(self, other) != nullptr) return false;
  return std::all_of(self.peerings.begin(), self.peerings.end(), [&](const auto& peering) {
    return peering->other != &other || peering->session->writes_under_way() == 0;
  });
}

void SimWorld::meet_all() {
  for (std::size_t i = 0; i < now_.size(); ++i) {
    for (std::size_t j = i + 1; j < now_.size(); ++j) {
      Member& left = *now_[i];
      Member& right = *now_[j];
      if (!left.process->able() || !right.process->able()) continue;
      if (may_meet(left, right) && may_meet(right, left)) meet(left, right);
    }
  }
  clock_.after(kMeetNs, SimClock::kNobody, [this] { meet_all(); });
}

void SimWorld::meet(Member& left, Member& right) {
  clock_.log("meet", left.process->actor(), right.process->actor());
  count("meetings");
  const auto links = SimLink::make(clock_, faults_, watch_, left.process->actor(), right.process->actor());
  const auto join = [&](Member& self, Member& other, const std::shared_ptr<SimLink>& link) {
    for (const auto& before : self.peerings) {
      if (before->other != &other || before->gone_proved) continue;
      before->gone_proved = true;
      before->session->on_writer_gone();
    }
    Peering& peering = *self.peerings.emplace_back(std::make_unique<Peering>());
    peering.self = &self;
    peering.other = &other;
    peering.link = link;
    peering.session = std::make_shared<Session>(*self.process, other.process->metadata(),
                                                one_sided_ && !plan_.bugs.free_at_link_loss);
    std::vector<std::shared_ptr<Route>> routes;
    for (const bool one_sided : {true, false}) {
      if (!(one_sided ? one_sided_ : placed_)) continue;
      routes.push_back(std::make_shared<SimRoute>(clock_, faults_, watch_, self.process->actor(), one_sided,
                                                  self.process->blocks().spans(), other.process->blocks().spans(),
                                                  link));
    }
    peering.routes = routes;
    peering.session->start(link, std::move(routes));
    self.process->add_session(peering.session);
    link->start(std::make_shared<Watcher>(*this, peering));
  };
  join(left, right, links.first);
  join(right, left, links.second);
}

// --- fate ---

void SimWorld::plan_fates(int fates) {
  for (int i = 0; i < fates; ++i) {
    clock_.at(clock_.now_ns() + clock_.dice().between(kMs, kLifeNs), SimClock::kNobody, [this] { strike(); });
  }
}

void SimWorld::strike() {
  SimDice& dice = clock_.dice();
  Member& member = *now_[dice.below(now_.size())];
  if (quiet_ || !member.process->alive()) return;
  Peering* peering = any_peering(member);
  switch (dice.below(6)) {
    case 0:
      return kill(member);
    case 1:
      return pause(member);
    case 2:
      if (peering != nullptr) {
        count("resets");
        peering->link->close(Error(ErrorCode::kPeerLost, "the connection was reset"));
      }
      return;
    case 3:
      if (peering != nullptr) {
        count("cuts");
        peering->link->cut(clock_.now_ns() + dice.between(kMs, 3 * faults_.lease_ns));
      }
      return;
    case 4:
      if (peering != nullptr && member.process->able()) disconnect(*peering);
      return;
    default:
      count("slow applications");
      member.slow_until_ns = clock_.now_ns() + dice.between(10 * kMs, 300 * kMs);
      return;
  }
}

// SIGKILL, at whatever byte it is writing.
void SimWorld::kill(Member& member) {
  SimDice& dice = clock_.dice();
  clock_.log("kill", member.process->actor());
  count("kills");
  clock_.kill(member.process->actor());
  for (const auto& peering : member.peerings) {
    if (!peering->over) peering->link->die();
  }
  // Its pidfd becomes readable for each of the others, in their own time.
  clock_.after(dice.between(0, 40 * kMs), SimClock::kNobody, [this, &member] { prove_gone(member); });
  const auto place = static_cast<std::uint32_t>(std::find(now_.begin(), now_.end(), &member) - now_.begin());
  clock_.after(dice.between(0, 100 * kMs), SimClock::kNobody, [this, place] { start_process(place); });
}

void SimWorld::prove_gone(const Member& gone) {
  for (const auto& member : members_) {
    for (const auto& peering : member->peerings) {
      if (peering->other != &gone || peering->gone_proved) continue;
      clock_.after(clock_.dice().between(0, kMs), member->process->actor(), [&peering = *peering] {
        if (std::exchange(peering.gone_proved, true)) return;
        peering.session->on_writer_gone();
      });
    }
  }
}

// SIGSTOP, and SIGCONT some leases later.
void SimWorld::pause(Member& member) {
  if (!member.process->able()) return;
  clock_.log("pause", member.process->actor());
  count("pauses");
  clock_.pause(member.process->actor());
  clock_.after(clock_.dice().between(faults_.lease_ns / 2, 3 * faults_.lease_ns), SimClock::kNobody, [this, &member] {
    if (!member.process->alive()) return;
    clock_.log("resume", member.process->actor());
    member.resumed_ns = clock_.now_ns();
    clock_.resume(member.process->actor());
  });
}

// As a service does it: nothing new is written, what is under way ends, the peer is told, the link closes.
void SimWorld::disconnect(Peering& peering) {
  if (std::exchange(peering.parting, true)) return;
  clock_.log("disconnect", peering.self->process->actor());
  count("disconnections");
  peering.session->stop_writing(Error(ErrorCode::kPeerLost, "closed here"));
  finish_disconnect(peering);
}

void SimWorld::finish_disconnect(Peering& peering) {
  if (peering.over) return;
  if (peering.session->writes_under_way() > 0) {
    clock_.after(100'000, peering.self->process->actor(), [this, &peering] { finish_disconnect(peering); });
    return;
  }
  peering.session->say_drained();
  peering.link->close(Error(ErrorCode::kPeerLost, "closed here"));
}

// --- the oracle ---

// Every byte that lands, lands in a block that its writer may write now, or that nobody uses until the writer is gone.
void SimWorld::on_staging_buffer(const std::byte* at, std::size_t bytes, SimClock::Actor writer) {
  clock_.log("land", writer, bytes);
  std::uint64_t incarnation = 0;
  for (const auto& member : members_) {
    if (member->process->actor() == writer) incarnation = member->process->identity().incarnation;
  }
  for (const auto& member : members_) {
    const MediaSpans& spans = member->process->blocks().spans();
    for (const Medium medium : {Medium::kHbm, Medium::kDram}) {
      const MediumSpan& span = spans[medium];
      for (const Segment& segment : span.segments) {
        if (at < segment.base || at >= segment.base + segment.stride * span.blocks) continue;
        const auto block = static_cast<std::uint32_t>(static_cast<std::size_t>(at - segment.base) / segment.stride);
        const BlockOwner owner = member->process->pool().for_peers().owner_of(make_address(0, medium, 0, block));
        const bool open = owner.state == BlockState::kReserved || owner.state == BlockState::kLent ||
                          owner.state == BlockState::kQuarantined;
        if (member->process->alive() && (!open || owner.incarnation != incarnation)) {
          fail(std::string("R1: a write landed in a block that is ") + block_state_name(owner.state) +
               (open ? ", of somebody else" : ""));
        }
        return;
      }
    }
  }
  fail("R1: a write landed in no block at all");
}

std::string SimWorld::run() {
  clock_.run(end_ns_, [this] { return !failure_.empty(); });
  if (failure_.empty()) become_quiet();
  if (failure_.empty()) return {};
  return "KVPOOL_SEED=" + std::to_string(plan_.seed) + ": " + failure_ + "\n" + clock_.log_tail();
}

}  // namespace kvpool::testing
