// What the applications of the simulated world do: everything that a peer can be asked for, at any time.
#include "kvpool/transfer/route_probe.h"
#include "sim_world.h"

namespace kvpool::testing {
namespace {

constexpr std::int64_t kMs = 1'000'000;
constexpr std::int64_t kActNs = 4 * kMs;  // at most, from one act to the next

}  // namespace

void SimWorld::live_on(Member& member) {
  clock_.after(clock_.dice().between(50'000, kActNs), member.process->actor(), [this, &member] {
    try {
      if (!quiet_) act(member);
      if (member.process->alive()) look_at_jobs(member);
    } catch (const SimKilled&) {  // while it waited in a call
      return;
    }
    live_on(member);
  });
}

void SimWorld::act(Member& member) {
  const std::uint64_t drawn = clock_.dice().below(100);
  if (drawn < 29) return transfer(member);
  if (drawn < 32) return match_at(member);
  if (drawn < 36) return fetch_prompt(member);
  if (drawn < 43) return fetch(member);
  if (drawn < 46) return view(member);
  if (drawn < 48) {
    if (!member.viewed.empty()) read(member, member.viewed[clock_.dice().below(member.viewed.size())]);
    return;
  }
  if (drawn < 49) return unview(member);
  if (drawn < 53) return attend(member);
  if (drawn < 57) return borrow(member);
  if (drawn < 63) {
    Peering* const peering = any_peering(member);
    if (peering == nullptr) return;
    return give_back(member, *peering, 1 + clock_.dice().below(4), clock_.dice().between(0, 40 * kMs));
  }
  if (drawn < 68) {
    if (member.jobs.empty()) return;
    Job& job = member.jobs[clock_.dice().below(member.jobs.size())];
    if (job.transfer->cancel()) count("cancellations");
    return;
  }
  if (drawn < 78) return receive(member);
  if (drawn < 90) {
    for (Job& job : member.jobs) go_on(job);
    return;
  }
  if (drawn < 95) return work_alone(member);
  if (drawn < 98) return recall(member);
  probe(member);
}

SimWorld::Peering* SimWorld::any_peering(Member& member) {
  std::vector<Peering*> live;
  for (const auto& peering : member.peerings) {
    if (!peering->over && !peering->parting) live.push_back(peering.get());
  }
  return live.empty() ? nullptr : live[clock_.dice().below(live.size())];
}

std::int64_t SimWorld::draw_deadline() {
  SimDice& dice = clock_.dice();
  return clock_.now_ns() + (dice.chance(300) ? dice.between(0, 6 * kMs) : dice.between(10 * kMs, 250 * kMs));
}

// What page `page` of a prompt holds, wherever it lies.
std::uint64_t SimWorld::page_stamp(Token prompt, std::size_t page) noexcept {
  return (std::uint64_t{1} << 60) | static_cast<std::uint64_t>(prompt) << 16 | page;
}

std::vector<Address> SimWorld::alloc(Member& member, std::size_t n) {
  Pool& pool = member.process->pool();
  const MediumChoice medium = clock_.dice().chance(700) ? MediumChoice(Medium::kHbm) : kMixed;
  std::vector<Address> addresses(n);
  if (pool.try_alloc(n, medium, addresses.data())) return addresses;
  try {
    pool.alloc_evicting(n, medium, addresses.data());
  } catch (const Error&) {
    addresses.clear();
  }
  return addresses;
}

std::vector<Address> SimWorld::alloc_stamped(Member& member, std::size_t n, std::vector<std::uint64_t>& stamps) {
  std::vector<Address> addresses = alloc(member, n);
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    if (stamps.size() <= i) stamps.push_back(++stamps_);
    stamp(member.process->pool(), addresses[i], stamps[i]);
  }
  return addresses;
}

void SimWorld::transfer(Member& member) {
  SimDice& dice = clock_.dice();
  Peering* const peering = any_peering(member);
  if (peering == nullptr || member.jobs.size() >= kJobsMax) return;
  Job job;
  job.peering = peering;
  job.kind = static_cast<Job::Kind>(dice.below(4));
  job.deadline_ns = draw_deadline();
  job.serial = ++serials_;
  std::size_t n = 1 + dice.below(6);
  const bool named = job.kind == Job::Kind::kNamed || job.kind == Job::Kind::kNamedInsert;
  const bool insert = job.kind == Job::Kind::kInsert || job.kind == Job::Kind::kNamedInsert;
  TransferRequest request;
  if (named) {
    if (peering->borrowed.empty()) return;
    n = std::min<std::size_t>(n, peering->borrowed.size());
    for (std::size_t i = 0; i < n; ++i) {
      std::swap(peering->borrowed[i], peering->borrowed[i + dice.below(peering->borrowed.size() - i)]);
      job.named.push_back(peering->borrowed[i]);
    }
    request.to = job.named;
  }
  if (insert) {
    const auto id = static_cast<Token>(dice.below(kPrompts));
    request.insert = true;
    request.tokens = prompt(id, n);
    for (std::size_t i = 0; i < n; ++i) job.stamps.push_back(page_stamp(id, i));
  }
  // Now and then what another transfer reads already, and may see freed at any time.
  if (job.kind == Job::Kind::kPlain && dice.chance(400)) {
    for (const Job& other : member.jobs) {
      if (other.freed || other.kind == Job::Kind::kFetch) continue;
      job.local = other.local;
      job.stamps = other.stamps;
      job.freed = true;  // the other's to free
      break;
    }
  }
  if (!job.freed) job.local = alloc_stamped(member, n, job.stamps);
  if (job.local.empty()) return;
  job.told = job.kind == Job::Kind::kPlain || dice.chance(400);
  if (job.told) {
    Bytes bytes(sizeof(job.serial));
    std::memcpy(bytes.data(), &job.serial, sizeof(job.serial));
    request.private_bytes = std::move(bytes);
    sent_[job.serial] = {job.stamps, named};
  }
  request.peer = peering->session->peer().name;
  request.from = job.local;
  request.medium = dice.chance(700) ? MediumChoice(Medium::kHbm) : kMixed;
  request.may_evict = dice.chance(800);
  request.strategy = static_cast<Strategy>(dice.below(5));
  request.checksum = dice.chance(300);
  request.streamed = job.streamed = dice.chance(200);
  request.deadline_ns = job.deadline_ns;
  if (job.streamed) job.layers = kLayers;
  clock_.log("transfer", job.serial, static_cast<std::uint64_t>(job.kind));
  count("transfers");
  try {
    job.transfer = peering->session->transfer(std::move(request));
  } catch (const Error& error) {
    // Of these blocks another transfer may be under way, or its end unknown.
    const bool known = error.code() == ErrorCode::kPeerLost || error.code() == ErrorCode::kBusy ||
                       (named && (error.code() == ErrorCode::kState || error.code() == ErrorCode::kNotOwner ||
                                  error.code() == ErrorCode::kStaleAddress));
    if (!known) fail(std::string("R3: a transfer was refused: ") + error.what());
    if (!job.freed) member.process->pool().free(job.local.data(), job.local.size());
    peering->borrowed = peering->session->borrowed().borrowed_among(peering->borrowed);  // some may be recalled
    return;
  }
  for (const Address address : job.named) peering->named_by[address] = job.serial;
  // The blocks may be freed while they are read: what the reader gets is what they were.
  if (!job.freed && dice.chance(250)) {
    member.process->pool().free(job.local.data(), job.local.size());
    job.freed = true;
  }
  member.jobs.push_back(std::move(job));
}

// Sends the next layer of a streamed transfer.
void SimWorld::go_on(Job& job) {
  if (!job.streamed || job.transfer->done()) return;
  try {
    if (job.layers > 0) return job.transfer->send_layer(--job.layers);
    job.transfer->finish();
  } catch (const Error& error) {
    // A stream that has failed, or is about to, says with what; then the caller sends no more.
    job.streamed = false;
    if (error.code() != ErrorCode::kArgument && error.code() != ErrorCode::kState) return;
    fail(std::string("R3: a layer was refused: ") + error.what());
  }
}

// Blocks that somebody has named: a router its cached prompts, or the owner itself.
std::vector<SimWorld::Owned> SimWorld::blocks_of(Member& owner) {
  SimDice& dice = clock_.dice();
  std::vector<Owned> found;
  if (!owner.owned.empty() && dice.chance(400)) {
    found.push_back(owner.owned[dice.below(owner.owned.size())]);
  } else {
    const auto id = static_cast<Token>(dice.below(kPrompts));
    const Tokens tokens = prompt(id, kPromptPages);
    for (const Address address : owner.process->pool().explain("", tokens.data(), tokens.size()).addresses) {
      found.push_back({address, page_stamp(id, found.size())});
    }
  }
  for (Owned& one : found) {
    if (instance_of(one.address) == 0) {
      one.address |= Address{owner.process->identity().instance} << kInstanceShift;
    }
  }
  return found;
}

void SimWorld::fetch(Member& member) {
  SimDice& dice = clock_.dice();
  Peering* const peering = any_peering(member);
  if (peering == nullptr || member.jobs.size() >= kJobsMax) return;
  Job job;
  job.kind = Job::Kind::kFetch;
  job.peering = peering;
  job.deadline_ns = draw_deadline();
  job.serial = ++serials_;
  std::vector<Address> from;
  for (const Owned& one : blocks_of(*peering->other)) {
    from.push_back(one.address);
    job.stamps.push_back(one.stamp);
  }
  if (from.empty()) return;
  job.local = alloc(member, from.size());
  if (job.local.empty()) return;
  job.freed = dice.chance(500);  // when it fails
  clock_.log("fetch", job.serial, from.size());
  count("fetches");
  try {
    FetchRequest request;
    request.from = std::move(from);
    request.to = job.local;
    request.deadline_ns = job.deadline_ns;
    job.transfer = peering->session->fetch(request, job.freed);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kPeerLost && error.code() != ErrorCode::kBusy) {
      fail(std::string("R3: a fetch was refused: ") + error.what());
    }
    member.process->pool().free(job.local.data(), job.local.size());
    return;
  }
  member.jobs.push_back(std::move(job));
}

// Measures the routes, whatever comes of it: nobody may notice.
void SimWorld::probe(Member& member) {
  SimDice& dice = clock_.dice();
  Peering* const peering = any_peering(member);
  if (peering == nullptr || waiting_) return;
  waiting_ = true;
  const std::int64_t until = clock_.now_ns() + dice.between(0, 20 * kMs);
  const Medium to = dice.chance(800) ? Medium::kHbm : Medium::kDram;
  clock_.log("probe", peering->other->process->actor());
  count("probes");
  RouteProbe(*peering->session, Medium::kHbm, to, peering->routes).run(until, draw_deadline());
  waiting_ = false;
}

void SimWorld::receive(Member& member) {
  if (clock_.now_ns() < member.slow_until_ns) return;
  for (std::size_t n = 1 + clock_.dice().below(3); n > 0; --n) {
    auto item = member.process->received().pop(0);
    if (item == nullptr) return;
    take(member, std::move(item));
  }
}

void SimWorld::take(Member& member, std::unique_ptr<Received> item) {
  Pool& pool = member.process->pool();
  std::uint64_t serial = 0;
  if (item->private_bytes.size() == sizeof(serial)) std::memcpy(&serial, item->private_bytes.data(), sizeof(serial));
  clock_.log("received", serial, item->addresses.size());
  count("items received");
  const auto sent = sent_.find(serial);
  if (sent == sent_.end()) return fail("R1: an item arrived that nobody sent");
  if (!got_.insert(serial).second) return fail("R3: an item arrived twice");
  if (item->lent != (sent->second.named && !item->inserted)) return fail("an item is wrong about whose its blocks are");
  const bool own = !item->inserted && !item->lent;  // what is lent stays the peer's
  for (std::size_t i = 0; i < item->addresses.size() && (own || item->inserted); ++i) {
    if (!has_stamp(pool, item->addresses[i], sent->second.stamps.at(i)))
      return fail("R1: a block arrived with wrong bytes");
    if (own) member.owned.push_back({item->addresses[i], sent->second.stamps[i]});
  }
  if (item->inserted) member.pinned.push_back(std::move(item));
}

void SimWorld::work_alone(Member& member) {
  SimDice& dice = clock_.dice();
  Pool& pool = member.process->pool();
  switch (dice.below(6)) {
    case 0: {
      std::vector<std::uint64_t> stamps;
      const std::vector<Address> addresses = alloc_stamped(member, 1 + dice.below(4), stamps);
      for (std::size_t i = 0; i < addresses.size(); ++i) member.owned.push_back({addresses[i], stamps[i]});
      return;
    }
    case 1:
      while (!member.owned.empty() && dice.chance(600)) {
        std::swap(member.owned[dice.below(member.owned.size())], member.owned.back());
        const Owned one = member.owned.back();
        member.owned.pop_back();
        if (!has_stamp(pool, one.address, one.stamp)) return fail("R1: somebody wrote into a block of the application");
        pool.free(&one.address, 1);
      }
      return;
    case 2: {
      const auto id = static_cast<Token>(dice.below(kPrompts));
      const std::size_t n = 1 + dice.below(kPromptPages);
      std::vector<std::uint64_t> stamps;
      stamps.reserve(n);
      for (std::size_t i = 0; i < n; ++i) stamps.push_back(page_stamp(id, i));
      const std::vector<Address> addresses = alloc_stamped(member, n, stamps);
      if (addresses.empty()) return;
      const Held held = insert(member.process->shared_pool(), prompt(id, n), addresses, "", true);
      return;
    }
    case 3:
      pool.evict(dice.below(6), kMixed);
      return;
    case 4:
      if (member.process->identity().dram_blocks > 0) pool.swap_out(dice.below(5));
      return;
    default:
      for (const auto& item : member.pinned) pool.unpin(&item->pin, 1);
      member.pinned.clear();
      return check_cached(member);
  }
}

}  // namespace kvpool::testing
