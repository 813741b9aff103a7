// What the applications of the simulated world read of each other's blocks where they lie: views, and readings through
// a mapping.
#include <algorithm>

#include "sim_world.h"

namespace kvpool::testing {
namespace {

constexpr std::int64_t kMs = 1'000'000;
constexpr std::int64_t kReadNs = 150 * kMs;  // at most
constexpr std::size_t kViewsMax = 4;         // of one application

}  // namespace

// Its cached blocks, those of its application, or those that it has lent.
void SimWorld::view(Member& member) {
  SimDice& dice = clock_.dice();
  Peering* const peering = any_peering(member);
  if (peering == nullptr || waiting_ || member.viewed.size() >= kViewsMax) return;
  Viewed viewed;
  viewed.peering = peering;
  if (!peering->borrowed.empty() && dice.chance(300)) {
    viewed.addresses = peering->borrowed;
    viewed.stamps.assign(viewed.addresses.size(), 0);
  } else {
    for (const Owned& one : blocks_of(*peering->other)) {
      viewed.addresses.push_back(one.address);
      viewed.stamps.push_back(one.stamp);
    }
  }
  if (viewed.addresses.empty()) return;
  waiting_ = true;
  const std::int64_t deadline = draw_deadline();
  clock_.log("view", viewed.addresses.size(), peering->other->process->actor());
  try {
    viewed.view = RemoteView::open(peering->session);
    viewed.view->add(0, viewed.addresses, deadline);
    count("views");
    member.viewed.push_back(std::move(viewed));
    if (dice.chance(700)) read(member, member.viewed.back());
  } catch (const Error& error) {
    switch (error.code()) {
      case ErrorCode::kPeerLost:
      case ErrorCode::kDeadline:
      case ErrorCode::kBusy:
      case ErrorCode::kStaleAddress:  // freed, moved, evicted or recalled meanwhile
      case ErrorCode::kNotOwner:
      case ErrorCode::kState:
        break;
      default:
        fail(std::string("R3: a view was refused: ") + error.what());
    }
  } catch (...) {
    waiting_ = false;
    throw;
  }
  waiting_ = false;
  if (clock_.now_ns() > std::max(deadline, member.resumed_ns) + kMs) fail("R3: a view came after its deadline");
}

void SimWorld::unview(Member& member) {
  if (member.viewed.empty()) return;
  std::swap(member.viewed[clock_.dice().below(member.viewed.size())], member.viewed.back());
  clock_.log("unview", member.viewed.back().addresses.size());
  member.viewed.pop_back();
}

// For some time, in which the view may be closed, the blocks recalled, and the link lost.
void SimWorld::read(Member& member, const Viewed& viewed) {
  if (!viewed.view->is_readable({0, viewed.addresses.size()})) return;
  auto reading = std::make_unique<Reading>();
  reading->owner = viewed.peering->other;
  for (std::size_t i = 0; i < viewed.addresses.size(); ++i) {
    if (viewed.stamps[i] != 0) reading->blocks.push_back({viewed.addresses[i], viewed.stamps[i]});
  }
  try {
    reading->held = viewed.view->read();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kPeerLost) fail(std::string("R3: a reading was refused: ") + error.what());
    return;
  }
  clock_.log("read", reading->blocks.size());
  count("readings");
  Reading& begun = *member.readings.emplace_back(std::move(reading));
  clock_.after(clock_.dice().between(0, kReadNs), member.process->actor(),
               [this, &member, &begun] { end_reading(member, begun); });
}

void SimWorld::end_reading(Member& member, Reading& reading) {
  for (const Owned& one : reading.blocks) {
    if (!reading.owner->process->alive()) break;  // the result is not used: its owner is lost
    if (has_stamp(reading.owner->process->pool(), one.address, one.stamp)) continue;
    fail("R1: a block was reused while a peer read it");
  }
  std::erase_if(member.readings, [&](const auto& one) { return one.get() == &reading; });
}

// What is in a view keeps its content, as long as both sides know of the link.
void SimWorld::check_views(Member& member) {
  std::erase_if(member.viewed, [](const Viewed& viewed) { return viewed.peering->over; });
  for (const Viewed& viewed : member.viewed) {
    Member& owner = *viewed.peering->other;
    const Peering* const back = live(owner, member);
    if (!owner.process->alive() || back == nullptr || back->link->ended() || viewed.peering->link->ended()) continue;
    for (std::size_t i = 0; i < viewed.addresses.size(); ++i) {
      if (viewed.stamps[i] == 0 || !viewed.view->missing({i, 1}).empty()) continue;
      if (has_stamp(owner.process->pool(), viewed.addresses[i], viewed.stamps[i])) continue;
      return fail("R1: a block was reused while a peer viewed it");
    }
  }
}

void SimWorld::end_views(Member& member) {
  member.viewed.clear();
  if (!member.readings.empty()) fail("R3: a reading has not ended");
  if (!member.attending.empty()) fail("R3: a call for attention has not ended");
}

}  // namespace kvpool::testing
