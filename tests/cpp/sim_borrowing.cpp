// What the applications of the simulated world do with borrowed blocks: borrow, give back, recall.
#include <algorithm>

#include "sim_world.h"

namespace kvpool::testing {
namespace {

constexpr std::int64_t kMs = 1'000'000;

}  // namespace

// One call that waits at a time in the whole world: calls in calls would wait for each other.
void SimWorld::borrow(Member& member) {
  SimDice& dice = clock_.dice();
  Peering* const peering = any_peering(member);
  if (peering == nullptr || waiting_) return;
  waiting_ = true;
  const std::size_t n = 1 + dice.below(5);
  const std::int64_t deadline = draw_deadline();
  clock_.log("borrow", n, peering->other->process->actor());
  count("borrowings");
  try {
    const std::vector<Address> lent = peering->session->borrow(n, kMixed, dice.chance(700), deadline);
    peering->borrowed.insert(peering->borrowed.end(), lent.begin(), lent.end());
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kProtocol) fail(std::string("R3: a loan was refused: ") + error.what());
  } catch (...) {
    waiting_ = false;
    throw;
  }
  waiting_ = false;
  if (clock_.now_ns() > std::max(deadline, member.resumed_ns) + kMs) fail("R3: a loan came after its deadline");
}

void SimWorld::give_back(Member& member, Peering& peering, std::size_t n, std::int64_t timeout_ns) {
  if (waiting_) return;
  n = std::min(n, peering.borrowed.size());
  if (n == 0) return;
  const std::vector<Address> addresses(peering.borrowed.end() - static_cast<std::ptrdiff_t>(n), peering.borrowed.end());
  peering.borrowed.resize(peering.borrowed.size() - n);
  for (const Address address : addresses) peering.named_by.erase(address);
  waiting_ = true;
  const std::int64_t deadline = clock_.now_ns() + timeout_ns;
  clock_.log("give back", n, peering.other->process->actor());
  try {
    peering.session->give_back(addresses, deadline);
  } catch (const Error& error) {
    // Written by a transfer, or one of them was inserted by a transfer whose answer came too late, or nothing was sent.
    const bool kept = error.code() == ErrorCode::kState || error.code() == ErrorCode::kBusy;
    if (kept) peering.borrowed.insert(peering.borrowed.begin(), addresses.begin(), addresses.end());
    const bool mixed = error.code() == ErrorCode::kNotOwner || error.code() == ErrorCode::kStaleAddress;
    if (mixed && addresses.size() > 1) {
      waiting_ = false;
      for (const Address address : addresses) {
        peering.borrowed.push_back(address);
        give_back(member, peering, 1, timeout_ns);
      }
      return;
    }
    if (error.code() == ErrorCode::kProtocol) fail(std::string("R3: a return was refused: ") + error.what());
  } catch (...) {
    waiting_ = false;
    throw;
  }
  waiting_ = false;
  if (clock_.now_ns() > std::max(deadline, member.resumed_ns) + kMs) fail("R3: a return came after its deadline");
}

// Wants back what it has lent. Whatever the borrower does, the recall ends by its deadline, and nothing is lost.
void SimWorld::recall(Member& member) {
  Peering* const peering = any_peering(member);
  if (peering == nullptr) return;
  const std::vector<Address> lent = peering->session->receiver().some_lent(1 + clock_.dice().below(4));
  if (lent.empty()) return;
  const std::int64_t deadline = draw_deadline();
  clock_.log("recall", lent.size(), peering->other->process->actor());
  count("recalls");
  try {
    peering->session->begin_recall(
        lent, deadline, [this, &member, deadline, n = lent.size()](const RecallResult* result, const Error* error) {
          if (clock_.now_ns() > std::max(deadline, member.resumed_ns) + kMs)
            fail("R3: a recall goes on after its deadline");
          if (error != nullptr && error->code() != ErrorCode::kPeerLost && error->code() != ErrorCode::kBusy) {
            fail(std::string("R3: a recall was refused: ") + error->what());
          }
          if (result == nullptr) return;
          if (result->returned + result->freed + result->quarantined != n) {
            fail("R2: a recall has lost sight of blocks");
          }
          if (result->returned > 0) count("returned when recalled");
          if (result->freed > 0) count("taken back at once");
          if (result->quarantined > 0) count("taken back into quarantine");
        });
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kPeerLost && error.code() != ErrorCode::kBusy) {
      fail(std::string("R3: a recall was not begun: ") + error.what());
    }
  }
}

// Some give them back, soon or too late; others do not care.
void SimWorld::on_recalled(Member& member, const Session& session, const std::vector<Address>& addresses) {
  SimDice& dice = clock_.dice();
  if (dice.chance(300)) return;
  for (const auto& peering : member.peerings) {
    if (peering->session.get() != &session) continue;
    clock_.after(dice.between(0, 60 * kMs), member.process->actor(), [this, &member, &peering = *peering, addresses] {
      if (quiet_ || peering.over) return;
      std::ranges::stable_partition(
          peering.borrowed, [&](Address address) { return std::ranges::find(addresses, address) == addresses.end(); });
      try {
        give_back(member, peering, addresses.size(), 40 * kMs);
      } catch (const SimKilled&) {
        return;
      }
    });
  }
}

}  // namespace kvpool::testing
