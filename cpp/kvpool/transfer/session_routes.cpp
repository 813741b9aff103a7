// The routes of a session: which one a write takes, what they are taken to cost, and writing by them.
#include <algorithm>
#include <iterator>
#include <utility>

#include "kvpool/base/failure.h"
#include "kvpool/transfer/route_probe.h"
#include "kvpool/transfer/session.h"

namespace kvpool {
namespace {

// Of a pair of media, in a word.
std::uint32_t pair_bit(Medium source, Medium target) noexcept {
  static_assert(kMedia.size() * kMedia.size() <= 32);
  return 1U << (medium_index(source) * kMedia.size() + medium_index(target));
}

}  // namespace

std::vector<std::string> Session::route_names() const {
  std::vector<std::string> names;
  const std::lock_guard lock(mutex());
  names.reserve(routes_.size());
  for (const auto& route : routes_) {
    // Of a pool on a GPU there are two of the same name: one by the CPU, one by the GPU.
    if (std::ranges::find(names, route->name()) == names.end()) names.emplace_back(route->name());
  }
  return names;
}

std::vector<RouteFailure> Session::route_failures() const {
  std::vector<RouteFailure> failures;
  const std::lock_guard lock(mutex());
  for (const auto& route : routes_) {
    if (auto report = route->health().report()) failures.push_back({route->name(), std::move(*report)});
  }
  return failures;
}

std::vector<RoutePrice> Session::route_prices() const {
  std::vector<RoutePrice> prices;
  const std::lock_guard lock(mutex());
  for (const auto& route : routes_) {
    const RouteCost* const cost = route->cost();
    if (cost == nullptr) continue;
    bool measured = false;
    for (const Medium from : kMedia) {
      for (const Medium to : kMedia) {
        const auto prior = cost->measured_prior(from, to);
        if (!prior) continue;
        measured = true;
        prices.push_back({route->name(), std::pair(from, to), *prior});
      }
    }
    if (!measured) prices.push_back({route->name(), std::nullopt, cost->guess()});
  }
  return prices;
}

// --- the choice ---

std::shared_ptr<Route> Session::choose_route(const std::string& name, const WriteSize& size, const MediaSet& from,
                                             const MediaSet& to, bool whole) {
  auto route = cheapest(name, size, from, to, whole);
  if (name.empty()) want_measured(from, to);
  return route;
}

std::vector<std::shared_ptr<Route>> Session::routes_now() const {
  const std::lock_guard lock(mutex());
  return routes_;
}

std::shared_ptr<Route> Session::cheapest(const std::string& name, const WriteSize& size, const MediaSet& from,
                                         const MediaSet& to, bool whole) const {
  const std::int64_t now_ns = host_.now_ns();
  const std::vector<std::shared_ptr<Route>> routes = routes_now();
  if (routes.empty()) throw_lost();
  if (whole && name.empty()) {
    std::vector<std::shared_ptr<Route>> checkable;
    std::ranges::copy_if(routes, std::back_inserter(checkable), [](const auto& one) { return one->traits().whole; });
    if (auto best = cheapest_route(checkable, name, size, from, to, now_ns)) return best;
  }
  auto best = cheapest_route(routes, name, size, from, to, now_ns);
  if (best != nullptr) return best;
  std::string known;
  for (const auto& route : routes) known += (known.empty() ? "" : ", ") + std::string(route->name());
  throw Error(ErrorCode::kUnsupported, "there is no route " + name + " from these blocks to those of peer " +
                                           peer_.name + "; there are: " + known);
}

// --- measuring ---

// Those that have not been asked before. A question is worth it where guesses are far off: with memory on a GPU, or a
// route that does not go without saying. Between processes of one host without either, memory is faster than a socket.
std::vector<Session::Question> Session::claim_questions(const MediaSet& from, const MediaSet& to) {
  std::vector<Question> questions;
  if (!host_.limits().measure_routes || by_ranks_) return questions;
  BlockHost& blocks = host_.blocks();
  for (const Medium source : kMedia) {
    for (const Medium target : kMedia) {
      std::atomic<bool>& claimed = claimed_[source][target];
      if (!from[source] || !to[target] || claimed.load(std::memory_order_relaxed)) continue;
      RouteCandidates candidates;
      if (blocks.spans()[source].blocks > 0 && peer_.media[target].blocks > 0) {
        candidates = candidates_between(routes_now(), source, target);
      }
      const bool on_gpu = blocks.on_gpu(source) || peer_.media[target].kind == MemoryKind::kGpu;
      const bool asks = candidates.routes.size() > 1 && (on_gpu || candidates.by_name);
      if (!candidates.all) continue;  // later: a measurement beside a guess decides nothing
      if (claimed.exchange(true) || !asks) continue;
      questions.push_back({source, target, std::move(candidates.routes)});
    }
  }
  return questions;
}

void Session::measure(const std::vector<Question>& questions, const Waiting& waiting) {
  const std::int64_t until_ns = std::min(waiting.until_ns, host_.now_ns() + host_.limits().measure_ns);
  const auto failure = failure_of([&] {
    for (const Question& question : questions) {
      if (host_.now_ns() >= until_ns || lost()) return;
      RouteProbe(*this, question.from, question.to, question.routes).run(until_ns, waiting);
    }
  });
  if (failure && failure->code() == ErrorCode::kCancelled) throw Error(*failure);
}

void Session::measure_routes(const Waiting& waiting) {
  std::vector<Question> questions;
  if (failure_of([&] { questions = claim_questions({true, true}, {true, true}); })) return;
  measure(questions, waiting);
}

// A bit for each pair of media, as in claimed_.
void Session::want_measured(const MediaSet& from, const MediaSet& to) noexcept {
  if (!host_.limits().measure_routes || by_ranks_) return;
  std::uint32_t wanted = 0;
  for (const Medium source : kMedia) {
    for (const Medium target : kMedia) {
      if (!from[source] || !to[target] || claimed_[source][target].load(std::memory_order_relaxed)) continue;
      wanted |= pair_bit(source, target);
    }
  }
  if (wanted != 0) wanted_.fetch_or(wanted, std::memory_order_relaxed);
}

// Behind the write that has asked, so that neither meets the other, nor a stream that waits for what is written.
void Session::measure_wanted() noexcept {
  if (wanted_.load(std::memory_order_relaxed) == 0) return;
  const std::uint32_t wanted = wanted_.exchange(0);
  static_cast<void>(failure_of([&] {
    std::vector<Question> questions;
    for (const Medium source : kMedia) {
      for (const Medium target : kMedia) {
        if ((wanted & pair_bit(source, target)) == 0) continue;
        std::ranges::move(claim_questions(media_set_of(source), media_set_of(target)), std::back_inserter(questions));
      }
    }
    if (questions.empty()) return;
    host_.run_waiting(this, Priority::kBackground, [self = shared_from_this(), questions = std::move(questions)] {
      self->measure(questions, self->host_.now_ns() + self->host_.limits().measure_ns);
    });
  }));
}

// --- writing ---

void Session::after_write() noexcept {
  if (writes_under_way() > 0) return;
  if (!lost()) return measure_wanted();
  host_.drained(*this);
  let_go();
}

// A write is counted first, and then looks whether it may begin: a thread that has stopped the writes sees it counted,
// or it sees that they are stopped. REQUIRES: writes_ counts this one.
void Session::check_may_write() {
  if (!lost()) return;
  writes_.fetch_sub(1);
  after_write();
  throw_lost();
}

std::shared_ptr<const MediaSpans> Session::readable() const {
  const std::lock_guard lock(mutex());
  for (const auto& route : routes_) {
    if (auto spans = route->readable()) return spans;
  }
  return nullptr;
}

// Reading is counted as writing is: the peer may use its blocks for something else when it has heard that both are
// over.
std::shared_ptr<void> Session::begin_reading() {
  std::shared_ptr<Session> self = shared_from_this();
  writes_.fetch_add(1);
  check_may_write();
  return {static_cast<void*>(this), [self = std::move(self)](void*) {
            self->writes_.fetch_sub(1);
            self->after_write();
          }};
}

// Throws std::bad_alloc, or as throw_lost(); then nothing is written, and job.done is not called.
void Session::write(WriteJob&& job) {
  job.peer = peer_.incarnation;
  job.done = [self = shared_from_this(), done = std::move(job.done)](const WriteOutcome& outcome, const Error* error) {
    if (error != nullptr) self->note_broken(*error);  // before the count falls: who sees no write sees this
    self->writes_.fetch_sub(1);
    done(outcome, error);
    self->after_write();
  };
  writes_.fetch_add(1);
  check_may_write();
  try {
    host_.write(std::move(job));
  } catch (...) {
    writes_.fetch_sub(1);
    after_write();
    throw;
  }
}

void Session::write_here(WriteJob&& job) {
  const auto self = shared_from_this();
  bool told = false;
  job.done = [&, done = std::move(job.done)](const WriteOutcome& outcome, const Error* error) {
    told = true;
    if (error != nullptr) note_broken(*error);  // likewise
    writes_.fetch_sub(1);
    done(outcome, error);
  };
  writes_.fetch_add(1);
  check_may_write();
  try {
    host_.write_here(std::move(job));
  } catch (...) {
    if (!told) writes_.fetch_sub(1);
    after_write();
    throw;
  }
  after_write();
}

}  // namespace kvpool
