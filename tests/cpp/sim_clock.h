// Virtual time for the simulated transport: a queue of events, run one at a time in one thread. The same seed and the
// same calls give the same events in the same order, bit for bit; a log of them tells.
//
// Actors are what can stop: a process. Events of one that is paused wait until it goes on; of one that was killed they
// are dropped. Events of kNobody (the network, the kernel) always run.
//
// Thread-safety: none.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <vector>

namespace kvpool {

// A small generator whose numbers are the same everywhere.
class SimDice {
 public:
  explicit SimDice(std::uint64_t seed) noexcept : state_(seed) {}
  std::uint64_t any() noexcept;
  std::uint64_t below(std::uint64_t n) noexcept { return any() % n; }  // REQUIRES: n > 0
  std::int64_t between(std::int64_t low, std::int64_t high) noexcept {
    return low + static_cast<std::int64_t>(below(static_cast<std::uint64_t>(high - low) + 1));
  }
  // True `per_mille` times in a thousand.
  bool chance(std::uint32_t per_mille) noexcept { return per_mille > 0 && below(1000) < per_mille; }

 private:
  std::uint64_t state_;
};

class SimClock {
 public:
  using Actor = std::uint32_t;
  static constexpr Actor kNobody = 0;

  explicit SimClock(std::uint64_t seed);

  std::int64_t now_ns() const noexcept { return now_ns_; }
  SimDice& dice() noexcept { return dice_; }

  Actor add_actor();
  void pause(Actor actor);
  void resume(Actor actor);
  void kill(Actor actor);
  bool paused(Actor actor) const noexcept { return actors_[actor].paused; }
  bool alive(Actor actor) const noexcept { return !actors_[actor].dead; }

  // Runs `work` at this time, or now if that has passed; events of one time run in the order in which they were asked
  // for.
  void at(std::int64_t time_ns, Actor actor, std::function<void()> work);
  void after(std::int64_t delay_ns, Actor actor, std::function<void()> work) {
    at(now_ns_ + delay_ns, actor, std::move(work));
  }

  // Runs the next event. False without an event up to `until_ns`; then that is the time.
  bool step(std::int64_t until_ns);
  // Runs events until done() or that time.
  void run(std::int64_t until_ns, const std::function<bool()>& done);

  // Drops all events: before what they refer to goes.
  void clear();

  // What happened, for comparison and for people: a hash of all of it, and the last lines.
  void log(const char* what, std::uint64_t a = 0, std::uint64_t b = 0);
  std::uint64_t log_hash() const noexcept { return log_hash_; }
  std::uint64_t log_lines() const noexcept { return log_lines_; }
  std::string log_tail() const;

 private:
  struct Event {
    std::int64_t time_ns;
    std::uint64_t order;
    Actor actor;
    std::function<void()> work;
  };
  struct ActorState {
    bool paused = false;
    bool dead = false;
    std::vector<Event> waiting;
  };
  struct Line {
    std::int64_t time_ns;
    const char* what;
    std::uint64_t a;
    std::uint64_t b;
  };
  static constexpr std::size_t kTailLines = 60;

  static bool later(const Event& left, const Event& right) noexcept;
  void push(Event&& event);

  SimDice dice_;
  std::int64_t now_ns_ = 1'000'000'000;
  std::uint64_t order_ = 0;
  std::vector<Event> events_;  // a heap
  std::vector<ActorState> actors_;
  std::uint64_t log_hash_ = 0;
  std::uint64_t log_lines_ = 0;
  std::deque<Line> tail_;
};

}  // namespace kvpool
