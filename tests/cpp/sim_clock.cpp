#include "sim_clock.h"

#include <algorithm>
#include <utility>

namespace kvpool {
namespace {

// splitmix64
std::uint64_t mix(std::uint64_t bits) noexcept {
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9U;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebU;
  return bits ^ (bits >> 31);
}

}  // namespace

std::uint64_t SimDice::any() noexcept { return mix(state_ += 0x9e3779b97f4a7c15U); }

SimClock::SimClock(std::uint64_t seed) : dice_(seed), actors_(1) {}

SimClock::Actor SimClock::add_actor() {
  actors_.emplace_back();
  return static_cast<Actor>(actors_.size() - 1);
}

void SimClock::pause(Actor actor) { actors_[actor].paused = true; }

void SimClock::resume(Actor actor) {
  actors_[actor].paused = false;
  std::vector<Event> waiting = std::move(actors_[actor].waiting);
  actors_[actor].waiting.clear();
  for (Event& event : waiting) at(now_ns_, actor, std::move(event.work));
}

void SimClock::kill(Actor actor) {
  actors_[actor].dead = true;
  actors_[actor].waiting.clear();
}

bool SimClock::later(const Event& left, const Event& right) noexcept {
  return left.time_ns != right.time_ns ? left.time_ns > right.time_ns : left.order > right.order;
}

void SimClock::push(Event&& event) {
  events_.push_back(std::move(event));
  std::push_heap(events_.begin(), events_.end(), later);
}

void SimClock::at(std::int64_t time_ns, Actor actor, std::function<void()> work) {
  push(Event{std::max(time_ns, now_ns_), order_++, actor, std::move(work)});
}

void SimClock::clear() {
  const std::vector<Event> dropped = std::exchange(events_, {});
  for (ActorState& actor : actors_) actor.waiting.clear();
}

bool SimClock::step(std::int64_t until_ns) {
  while (!events_.empty() && events_.front().time_ns <= until_ns) {
    std::pop_heap(events_.begin(), events_.end(), later);
    Event event = std::move(events_.back());
    events_.pop_back();
    now_ns_ = std::max(now_ns_, event.time_ns);
    ActorState& actor = actors_[event.actor];
    if (actor.dead) continue;
    if (actor.paused) {
      actor.waiting.push_back(std::move(event));
      continue;
    }
    event.work();
    return true;
  }
  now_ns_ = std::max(now_ns_, until_ns);
  return false;
}

void SimClock::run(std::int64_t until_ns, const std::function<bool()>& done) {
  while (!done() && step(until_ns)) {
  }
}

void SimClock::log(const char* what, std::uint64_t a, std::uint64_t b) {
  std::uint64_t hash = log_hash_ ^ static_cast<std::uint64_t>(now_ns_);
  for (const char* letter = what; *letter != 0; ++letter) hash = mix(hash ^ static_cast<unsigned char>(*letter));
  log_hash_ = mix(mix(hash ^ a) ^ b);
  ++log_lines_;
  if (tail_.size() == kTailLines) tail_.pop_front();
  tail_.push_back({now_ns_, what, a, b});
}

std::string SimClock::log_tail() const {
  std::string text;
  for (const Line& line : tail_) {
    text += std::to_string(line.time_ns / 1000) + " us  " + line.what + " " + std::to_string(line.a) + " " +
            std::to_string(line.b) + "\n";
  }
  return text;
}

}  // namespace kvpool
