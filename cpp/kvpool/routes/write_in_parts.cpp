#include "kvpool/routes/write_in_parts.h"

#include <algorithm>
#include <exception>
#include <mutex>
#include <string>

#include "kvpool/base/clock.h"
#include "kvpool/base/error.h"
#include "kvpool/net/reactor.h"

namespace kvpool {
namespace {

constexpr std::uint64_t kPartBytesMin = std::uint64_t{128} << 10;
constexpr std::uint64_t kPartBytesMax = std::uint64_t{1} << 20;
constexpr std::uint64_t kPartsWanted = 16;  // enough that nobody waits long for the thread that has the last one

class SplitWrite {
 public:
  SplitWrite(const WriteRequest& request, const MediaSpans& local, const MediaSpans& peer, PieceMover& mover,
             const char* route, const std::atomic<bool>& closed)
      : request_(request), local_(local), peer_(peer), mover_(mover), route_(route), closed_(closed) {}

  WriteOutcome run(CopyTeam& team) {
    const std::uint64_t total = strip_bytes(request_.strips) * request_.from.size();
    if (total <= CopyTeam::kInlineBytes) {
      return outcome(move(request_.strips, request_.from, request_.to), total);
    }
    const PartLimits limits{.bytes_max = std::clamp(total / kPartsWanted, kPartBytesMin, kPartBytesMax)};
    const TransferParts parts(request_.strips, request_.from.size(), limits);
    parts_ = &parts;
    const auto part = [](void* self, std::size_t index) noexcept { static_cast<SplitWrite*>(self)->move_part(index); };
    team.run_parts(parts.size(), part, this);
    if (failure_) std::rethrow_exception(failure_);
    // Parts cut runs that are one piece by the plan; what counts is the plan.
    StripPlan plan(local_, peer_, request_.strips, request_.merge);
    return outcome(plan.count(request_.from, request_.to), total);
  }

 private:
  static WriteOutcome outcome(std::uint64_t pieces, std::uint64_t bytes) noexcept {
    return {.calls = pieces, .bytes = bytes, .pieces = pieces};
  }

  void move_part(std::size_t index) noexcept {
    if (failed_.load(std::memory_order_relaxed)) return;
    try {
      const TransferPart part = (*parts_)[index];
      move(part.strips, request_.from.subspan(part.first_block, part.blocks),
           request_.to.subspan(part.first_block, part.blocks));
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (!failure_) failure_ = std::current_exception();
      failed_.store(true, std::memory_order_relaxed);
    }
  }

  // Returns how many pieces there were.
  std::uint64_t move(std::span<const BlockStrip> strips, std::span<const Address> from, std::span<const Address> to) {
    throw_if_stopped(request_, route_, closed_);
    std::uint64_t moved = 0;
    StripPlan plan(local_, peer_, strips, request_.merge);
    plan.emit(from, to, [&](std::span<const CopyPiece> pieces) {
      mover_.move(pieces);
      moved += pieces.size();
      return true;
    });
    if (request_.bytes_done != nullptr) {
      request_.bytes_done->fetch_add(strip_bytes(strips) * from.size(), std::memory_order_relaxed);
    }
    return moved;
  }

  const WriteRequest& request_;
  const MediaSpans& local_;
  const MediaSpans& peer_;
  PieceMover& mover_;
  const char* const route_;
  const std::atomic<bool>& closed_;
  const TransferParts* parts_ = nullptr;
  std::atomic<bool> failed_{false};
  std::mutex mutex_;
  std::exception_ptr failure_;  // the first; read when all parts have ended
};

}  // namespace

void throw_if_stopped(const WriteRequest& request, const char* route, const std::atomic<bool>& closed) {
  if (closed.load(std::memory_order_relaxed)) {
    throw Error(ErrorCode::kPeerLost, std::string("the ") + route + " route to the peer is closed");
  }
  if (request.cancelled != nullptr && request.cancelled->load(std::memory_order_relaxed)) {
    throw Error(ErrorCode::kCancelled, "the transfer was cancelled");
  }
  if (monotonic_ns() >= request.deadline_ns) {
    throw Error(ErrorCode::kDeadline, std::string("the transfer was not done by its deadline (route ") + route + ")");
  }
}

void check_blocks(const WriteRequest& request, const MediaSpans& local, const MediaSpans& peer, const char* route) {
  const bool known = blocks_exist(request.from, local);
  if (request.from.size() == request.to.size() && known && blocks_exist(request.to, peer)) return;
  throw Error(ErrorCode::kArgument, std::string("a block to write ") + (known ? "to" : "from") +
                                        " does not exist, or the " + route + " route does not reach it");
}

WriteOutcome write_in_parts(const WriteRequest& request, const MediaSpans& local, const MediaSpans& peer,
                            PieceMover& mover, CopyTeam& team, const char* route, const std::atomic<bool>& closed) {
  check_blocks(request, local, peer, route);
  return SplitWrite(request, local, peer, mover, route, closed).run(team);
}

}  // namespace kvpool
