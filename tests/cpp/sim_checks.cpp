// What must hold in the simulated world, at the end of each request and at the end of it all.
#include "sim_world.h"
#include "thrown.h"

namespace kvpool::testing {
namespace {

constexpr std::int64_t kMs = 1'000'000;
constexpr std::int64_t kSlackNs = 6 * kMs;    // an application looks at its handles every 4 ms
constexpr std::int64_t kQuietNs = 900 * kMs;  // longer than any deadline, lease, pause or restart
constexpr std::int64_t kTidyNs = 300 * kMs;

std::uint32_t count_of(const MediumCounts& counts, BlockState state) {
  return counts.by_state[static_cast<std::size_t>(state)];
}

bool is_lent(Session& owner, Address address) {
  return !code_of([&] { owner.receiver().check_lent({&address, 1}); });
}

}  // namespace

void SimWorld::look_at_jobs(Member& member) {
  for (std::size_t i = 0; i < member.jobs.size();) {
    Job& job = member.jobs[i];
    if (!job.transfer->done()) {
      if (clock_.now_ns() > std::max(job.deadline_ns, member.resumed_ns) + kSlackNs) {
        return fail("R3: request " + std::to_string(job.serial) + " goes on after its deadline");
      }
      ++i;
      continue;
    }
    conclude(member, job);
    if (i + 1 < member.jobs.size()) job = std::move(member.jobs.back());
    member.jobs.pop_back();
  }
  check_owned(member);
  check_views(member);
  check_matches(member);
}

void SimWorld::conclude(Member& member, Job& job) {
  Pool& pool = member.process->pool();
  std::optional<Error> error;
  try {
    job.transfer->rethrow_if_failed();
  } catch (const Error& failure) {
    error = failure;
  }
  clock_.log("over", job.serial, error ? 1 + static_cast<std::uint64_t>(error->code()) : 0);
  const bool by_tokens = job.kind == Job::Kind::kFetchPrompt;
  const bool fetch = job.kind == Job::Kind::kFetch || by_tokens;
  if (!error) {
    count("successes");
    check_success(member, job);
    if (job.kind == Job::Kind::kNamedInsert) {
      for (const Address address : job.named) std::erase(job.peering->borrowed, address);
    }
    if (job.told) promised_[job.serial] = job.peering->other;
  } else {
    count("failures");
    switch (error->code()) {
      case ErrorCode::kPeerLost:
      case ErrorCode::kDeadline:
      case ErrorCode::kCancelled:
      case ErrorCode::kBusy:
      case ErrorCode::kOutOfBlocks:
        break;
      case ErrorCode::kStaleAddress:
      case ErrorCode::kNotOwner:
        if (!job.named.empty()) break;  // its destinations were recalled
        [[fallthrough]];
      case ErrorCode::kState:
        if (fetch && error->code() != ErrorCode::kNotOwner) break;  // the owner has freed or moved what was asked for
        [[fallthrough]];
      default:
        fail("R3: request " + std::to_string(job.serial) + " failed: " + error->what());
    }
  }
  if (fetch && !error && !by_tokens) {
    for (std::size_t i = 0; i < job.local.size(); ++i) member.owned.push_back({job.local[i], job.stamps[i]});
    return;
  }
  if (job.freed) return;
  try {
    pool.free(job.local.data(), job.local.size());
  } catch (const Error& refused) {
    // The owner may still write the destinations of a fetch that failed: they are the pool's now.
    if (!fetch) fail(std::string("R2: a source is not free to go: ") + refused.what());
  }
}

void SimWorld::check_success(Member& member, const Job& job) {
  if (job.kind == Job::Kind::kFetch) {
    for (std::size_t i = 0; i < job.local.size(); ++i) {
      if (!has_stamp(member.process->pool(), job.local[i], job.stamps[i])) fail("R1: wrong bytes were fetched");
    }
    return;
  }
  if (job.kind == Job::Kind::kFetchPrompt) return check_cached(member);
  const std::vector<Address>& there = job.transfer->addresses();
  if (there.size() != job.stamps.size()) return fail("R1: another number of blocks than were sent");
  // What is lent stays as it is until the next transfer, unless the link has ended since.
  Member& other = *job.peering->other;
  Peering* const back = live(other, member);
  if (job.kind != Job::Kind::kNamed || !other.process->alive() || back == nullptr || job.peering->over) return;
  if (back->link->ended()) return;
  for (std::size_t i = 0; i < there.size(); ++i) {
    if (job.peering->named_by[there[i]] != job.serial) continue;  // the next is under way
    if (!is_lent(*back->session, there[i])) continue;             // it was recalled
    if (!has_stamp(other.process->pool(), there[i], job.stamps[i])) fail("R1: wrong bytes in a named block");
  }
}

void SimWorld::check_owned(Member& member) {
  for (const Owned& one : member.owned) {
    if (has_stamp(member.process->pool(), one.address, one.stamp)) continue;
    return fail("R1: somebody wrote into a block of the application");
  }
}

void SimWorld::check_cached(Member& member) {
  for (Token id = 0; id < kPrompts; ++id) {
    const Found found = match(member.process->shared_pool(), prompt(id, kPromptPages));
    for (std::size_t page = 0; page < found.addresses.size(); ++page) {
      if (has_stamp(member.process->pool(), found.addresses[page], page_stamp(id, page))) continue;
      return fail("R1: a cached block holds another page");
    }
  }
}

// Nothing new is begun, nobody fails any more: what is under way ends, and what is held is given back.
void SimWorld::become_quiet() {
  quiet_ = true;
  const auto failed = [this] { return !failure_.empty(); };
  clock_.run(clock_.now_ns() + kQuietNs, failed);
  const SimFaults before = faults_;
  faults_.lose = faults_.reorder = faults_.replay = faults_.damage = faults_.busy = 0;
  clock_.run(clock_.now_ns() + kQuietNs, failed);
  for (Member* member : now_) {
    end_views(*member);
    member->matched.clear();
  }
  for (Member* member : now_) {
    if (failed()) return;
    if (!member->jobs.empty()) return fail("R3: a request has not ended");
    for (const auto& peering : member->peerings) {
      if (peering->over || !peering->other->process->alive()) continue;
      const Peering* const back = live(*peering->other, *member);
      if (back == nullptr || peering->session->borrowed_blocks() != back->session->counts().lent) {
        return fail("R2: " + std::to_string(peering->session->borrowed_blocks()) + " blocks are borrowed, and " +
                    std::to_string(back == nullptr ? 0 : back->session->counts().lent) + " are lent");
      }
      while (!peering->borrowed.empty() && !failed()) {
        give_back(*member, *peering, peering->borrowed.size(), kQuietNs);
      }
    }
  }
  clock_.run(clock_.now_ns() + kTidyNs, failed);
  for (Member* member : now_) {
    if (!failed()) check_quiet(*member);
  }
  faults_ = before;
}

void SimWorld::check_quiet(Member& member) {
  Pool& pool = member.process->pool();
  try {
    while (auto item = member.process->received().pop(0)) take(member, std::move(item));
    for (const auto& item : member.pinned) pool.unpin(&item->pin, 1);
    member.pinned.clear();
    check_owned(member);
    check_cached(member);
    for (const Owned& one : member.owned) pool.free(&one.address, 1);
    member.owned.clear();
    for (const auto& peering : member.peerings) {
      const ReceiverCounts counts = peering->session->counts();
      if (peering->session->match_counts().holds > 0) return fail("R2: a session holds a match that was closed");
      const std::uint32_t left = counts.lent + counts.reserved + counts.quarantined + counts.transfers;
      if (left > 0 || counts.promised > 0 || peering->session->writes_under_way() > 0) {
        return fail("R2: a session keeps " + std::to_string(counts.lent) + " lent, " + std::to_string(counts.reserved) +
                    " reserved, " + std::to_string(counts.quarantined) + " quarantined blocks, " +
                    std::to_string(counts.transfers) + " transfers, counts " + std::to_string(counts.promised) +
                    (peering->over ? "; its link has ended" : ""));
      }
    }
    const PoolStats stats = pool.audit();
    for (const MediumCounts& counts : stats.media) {
      for (const BlockState state :
           {BlockState::kActive, BlockState::kReserved, BlockState::kLent, BlockState::kQuarantined}) {
        if (count_of(counts, state) == 0) continue;
        return fail("R2: " + std::to_string(count_of(counts, state)) + " blocks are left " + block_state_name(state));
      }
    }
  } catch (const Error& error) {
    fail(std::string("R2: ") + error.what());
  }
  for (const auto& [serial, receiver] : promised_) {
    if (receiver == &member && !got_.contains(serial)) return fail("R3: what was sent did not arrive");
  }
}

}  // namespace kvpool::testing
