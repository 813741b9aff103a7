#include "kvpool/transfer/route_probe.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "kvpool/base/failure.h"
#include "kvpool/base/strips.h"
#include "kvpool/transfer/failure.h"
#include "kvpool/transfer/messages.h"

namespace kvpool {
namespace {

constexpr std::uint64_t kSmallBytes = 512;
constexpr std::uint64_t kRateBytes = std::uint64_t{64} << 10;  // in fewer no rate shows
constexpr std::int64_t kLifetimeMs = 10'000;  // of the reservation, and of a write: longer than any lease that is usual
constexpr std::int64_t kNsPerMs = 1'000'000;
constexpr std::int64_t kEndNs = 1'000'000'000;  // for the peer to say that it has its blocks back

double microseconds(std::int64_t ns) noexcept { return static_cast<double>(ns) / 1e3; }

}  // namespace

// Free blocks of this pool, at most so many: reserved for nobody, so that nobody but this probe has them.
class RouteProbe::OwnBlocks {
 public:
  OwnBlocks(BlockHost& host, Medium medium, std::size_t blocks_max) : host_(host) {
    for (std::size_t n = blocks_max; n > 0 && addresses_.empty(); n /= 2) {
      ReserveSpec spec;
      spec.blocks = n;
      spec.medium = medium;
      // None, too, where they would be filled with zeros first, and that waits for a GPU.
      const auto failure = failure_of([&] {
        if (auto taken = host_.reserve(spec, Writer{}, Room::kTry)) addresses_ = std::move(taken->addresses);
      });
      if (failure) return;
    }
  }
  ~OwnBlocks() { host_.release(addresses_); }
  OwnBlocks(const OwnBlocks&) = delete;
  OwnBlocks& operator=(const OwnBlocks&) = delete;

  std::span<const Address> addresses() const noexcept { return addresses_; }

 private:
  BlockHost& host_;
  std::vector<Address> addresses_;
};

RouteProbe::RouteProbe(Session& session, Medium from, Medium to, const std::vector<std::shared_ptr<Route>>& routes)
    : session_(session), from_(from), to_(to) {
  candidates_.reserve(routes.size());
  for (const auto& route : routes) candidates_.emplace_back().route = route;
}

void RouteProbe::run(std::int64_t until_ns, const Waiting& waiting) {
  bool given_up = false;
  const Waiting limited(until_ns, [&] { return given_up = given_up || (waiting.given_up && waiting.given_up()); });
  const OwnBlocks own(session_.host().blocks(), from_, blocks_max());
  if (own.addresses().empty()) return;
  const auto failure = failure_of([&] {
    if (!reserve(own.addresses().size(), limited)) return;
    sample_all(own.addresses(), until_ns, limited);
  });
  end(Waiting(std::min(std::max(until_ns, waiting.until_ns), session_.host().now_ns() + kEndNs)));
  if (given_up) throw Error(ErrorCode::kCancelled, "the caller has given up waiting");
  if (!failure) static_cast<void>(failure_of([&] { set_priors(); }));
}

std::size_t RouteProbe::blocks_max() const noexcept {
  const auto here = session_.host().blocks().spans()[from_].blocks;
  const auto there = session_.peer().media[to_].blocks;
  return std::min<std::size_t>(std::min<std::uint64_t>(here, there) / kShare, kBlocksMax);
}

// Blocks at the peer, at most so many. False when it has none to spare.
bool RouteProbe::reserve(std::size_t blocks, const Waiting& waiting) {
  for (std::size_t n = blocks; n > 0; n /= 2) {
    ReserveBody body;
    body.blocks = static_cast<std::uint32_t>(n);
    body.medium = to_;
    body.may_evict = false;
    body.one_sided = std::ranges::any_of(candidates_, [](const auto& one) { return one.route->traits().one_sided; });
    body.lifetime_ms = kLifetimeMs;
    id_ = session_.calls().next_id();
    asked_ = true;
    Message answer;
    const auto refused =
        failure_of([&] { answer = session_.calls().call(kReserveVerb, id_, write_body(body), waiting); });
    if (refused && refused->code() == ErrorCode::kOutOfBlocks) {
      asked_ = false;
      continue;
    }
    if (refused) throw Error(*refused);
    ReservedBody reserved = read_reserved(answer.body);
    session_.check_of_peer(reserved.addresses);
    addresses_ = std::move(reserved.addresses);
    return addresses_.size() == n;
  }
  return false;
}

// Few bytes and many, of one block and of several: so that latency, pieces and bytes can be told apart.
std::vector<RouteProbe::Size> RouteProbe::sizes() const {
  const Layout& layout = session_.host().blocks().layout();
  const std::uint64_t block = layout.block_bytes();
  const std::uint64_t few = std::min<std::uint64_t>({kSmallBytes, layout.piece_bytes[0], block});
  const std::uint64_t many = std::min(kBlockBytesMax, block);
  const auto together = static_cast<std::size_t>(std::max<std::uint64_t>(kBytesMax / many, 1));
  std::vector<Size> sizes;
  for (const Size& size :
       {Size{1, few}, Size{addresses_.size(), few}, Size{1, many}, Size{std::min(addresses_.size(), together), many}}) {
    const bool known = std::ranges::any_of(
        sizes, [&](const Size& one) { return one.blocks == size.blocks && one.bytes == size.bytes; });
    if (!known) sizes.push_back(size);
  }
  return sizes;
}

// Routes take turns, so that what else the machine does in these moments meets all of them alike.
void RouteProbe::sample_all(std::span<const Address> own, std::int64_t until_ns, const Waiting& waiting) {
  if (std::ranges::any_of(candidates_, [](const auto& one) { return !one.route->traits().one_sided; })) {
    std::array<double, kRepeats> answers{};
    for (double& one : answers) one = answer_us(waiting);
    std::ranges::sort(answers);
    answer_us_ = answers[answers.size() / 2];
  }
  SessionHost& host = session_.host();
  const std::vector<Size> all = sizes();
  for (const Size& size : all) {
    for (int i = 0; i < kRepeats; ++i) {
      for (Candidate& candidate : candidates_) {
        waiting.check();
        const std::int64_t left_ns = until_ns - host.now_ns();
        if (left_ns <= 0 && &size == &all.back()) return;  // the others tell latency, pieces and bytes apart
        if (left_ns <= 0) throw Error(ErrorCode::kDeadline, "the time did not do");
        // One whole block has shown how long several would take.
        const bool late = size.blocks > 1 &&
                          candidate.whole_us * static_cast<double>(size.blocks) * 1e3 > static_cast<double>(left_ns);
        if (!candidate.out && !late) sample(candidate, size, own, waiting);
      }
    }
  }
}

void RouteProbe::sample(Candidate& candidate, const Size& size, std::span<const Address> own, const Waiting& waiting) {
  SessionHost& host = session_.host();
  const BlockStrip strip{0, 0, size.bytes};
  std::optional<Error> failure;
  WriteOutcome outcome;
  WriteJob job;
  job.route = candidate.route;
  job.bytes = size.bytes * size.blocks;
  job.request.transfer = id_;
  job.request.strips = {&strip, 1};
  job.request.from = own.first(size.blocks);
  job.request.to = std::span(addresses_).first(size.blocks);
  job.request.merge = false;  // as many pieces as there are, wherever the blocks lie
  // Late, and not when the time of this probe is over: a frame that is given up in its middle ends the link.
  const std::int64_t began_ns = host.now_ns();
  job.request.deadline_ns = began_ns + kLifetimeMs * kNsPerMs;
  job.done = [&](const WriteOutcome& done, const Error* error) {
    outcome = done;
    if (error != nullptr) failure = *error;
  };
  session_.write_here(std::move(job));
  const double us = microseconds(host.now_ns() - began_ns);
  if (failure && breaks_route(*failure)) {
    broken_ = true;
    session_.on_route_broken(*failure);
    throw Error(*failure);
  }
  candidate.out = failure.has_value();
  if (candidate.out) return;
  double arrived_us = us;
  if (!candidate.route->traits().one_sided) arrived_us += std::max(answer_us(waiting) - answer_us_, 0.0);
  candidate.written.push_back({outcome.pieces, outcome.bytes, us});
  candidate.arrived.push_back({outcome.pieces, outcome.bytes, arrived_us});
  if (size.bytes == std::min(kBlockBytesMax, host.blocks().layout().block_bytes()) && size.blocks == 1) {
    candidate.whole_us = arrived_us;
  }
}

// How long the peer takes for a word that changes nothing, behind all that was sent before.
double RouteProbe::answer_us(const Waiting& waiting) {
  const std::int64_t began_ns = session_.host().now_ns();
  static_cast<void>(session_.calls().call(kAbandonVerb, session_.calls().next_id(), {}, waiting));
  return microseconds(session_.host().now_ns() - began_ns);
}

void RouteProbe::set_priors() {
  struct Found {
    RouteCost* cost;
    RoutePrior write;
    RoutePrior arrival;
  };
  std::vector<Found> all;
  for (const Candidate& candidate : candidates_) {
    if (candidate.out || candidate.route->cost() == nullptr) continue;
    const RoutePrior& guess = candidate.route->cost()->guess();
    auto write = fit_cost(candidate.written);
    const auto arrived = fit_cost(candidate.arrived);
    if (!write || !arrived) return;  // a measurement beside a guess decides nothing
    const auto shorter = [](const CostSample& one) { return one.bytes < kRateBytes; };
    if (std::ranges::all_of(candidate.written, shorter)) {
      // Blocks of a few KiB: latency is what was measured, and the noise of it must not make long writes free.
      write->us_per_piece = std::max(write->us_per_piece, guess.us_per_piece);
      write->us_per_byte = std::max(write->us_per_byte, guess.us_per_byte);
    }
    // Nor does one block show what several cost more than its bytes.
    if (addresses_.size() == 1) write->us_per_piece = std::max(write->us_per_piece, guess.us_per_piece);
    const auto more = [](double whole, double part) { return std::max(whole - part, 0.0); };
    all.push_back({candidate.route->cost(),
                   *write,
                   {more(arrived->latency_us, write->latency_us), more(arrived->us_per_piece, write->us_per_piece),
                    more(arrived->us_per_byte, write->us_per_byte)}});
  }
  for (const Found& one : all) one.cost->set_prior(from_, to_, one.write, one.arrival);
}

// Nothing writes any more, unless the route is broken: then the link has ended, and the peer waits for the proof.
void RouteProbe::end(const Waiting& waiting) noexcept {
  if (!asked_ || broken_ || session_.lost()) return;
  const auto unsaid = failure_of([&] { static_cast<void>(session_.calls().call(kAbandonVerb, id_, {}, waiting)); });
  if (unsaid && !session_.lost()) session_.calls().post(kAbandonVerb, id_);  // or the link ends
}

}  // namespace kvpool
