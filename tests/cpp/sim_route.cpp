#include "sim_route.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kvpool/base/error.h"
#include "kvpool/net/data_body.h"

namespace kvpool {
namespace {

constexpr PartLimits kFrameLimits{.bytes_max = 512, .blocks_max = 3, .strips_max = 8, .pieces_max = 16};

}  // namespace

SimWrite::SimWrite(const SimRoute& route, const WriteRequest& request) : route_(route), request_(request) {
  const bool known = blocks_exist(request.from, route.local_) && blocks_exist(request.to, route.peer_);
  if (!known || request.from.size() != request.to.size()) {
    throw Error(ErrorCode::kArgument, "a block to write from or to does not exist");
  }
  if (!route.one_sided_) {
    parts_.emplace(request_.strips, request_.from.size(), kFrameLimits);
    return;
  }
  StripPlan plan(route.local_, route.peer_, request_.strips, request_.merge);
  plan.emit(request_.from, request_.to, [&](std::span<const CopyPiece> pieces) {
    pieces_.insert(pieces_.end(), pieces.begin(), pieces.end());
    return true;
  });
  outcome_.calls = pieces_.size();
}

void SimWrite::check_open() const {
  if (route_.closed_) throw Error(ErrorCode::kPeerLost, "the route to the peer is closed");
}

void SimWrite::check_stopped() const {
  check_open();
  if (request_.cancelled != nullptr && request_.cancelled->load()) {
    throw Error(ErrorCode::kCancelled, "the transfer was cancelled");
  }
  if (route_.clock_.now_ns() >= request_.deadline_ns) {
    throw Error(ErrorCode::kDeadline, "the transfer was not done by its deadline");
  }
}

bool SimWrite::step() {
  const bool over = parts_ ? next_part_ == parts_->size() : pieces_.empty();
  if (over) return true;
  if (parts_) {
    check_open();
    send_frame();  // the link looks at the deadline, for a frame may have begun before it
  } else {
    check_stopped();
    copy_some();
  }
  return false;
}

// Any piece, up to any byte of it.
void SimWrite::copy_some() {
  SimDice& dice = route_.clock_.dice();
  CopyPiece& piece = pieces_[dice.below(pieces_.size())];
  const std::size_t bytes =
      std::min(piece.bytes, 1 + static_cast<std::size_t>(dice.below(route_.faults_.staging_buffer_bytes)));
  route_.watch_(piece.dst, bytes, route_.writer_);
  std::memcpy(piece.dst, piece.src, bytes);
  piece.dst += bytes;
  piece.src += bytes;
  piece.bytes -= bytes;
  outcome_.bytes += bytes;
  if (request_.bytes_done != nullptr) request_.bytes_done->fetch_add(bytes, std::memory_order_relaxed);
  if (piece.bytes > 0) return;
  std::swap(piece, pieces_.back());
  pieces_.pop_back();
}

void SimWrite::send_frame() {
  const TransferPart part = (*parts_)[next_part_++];
  Bytes body;
  write_data_body(part.strips, request_.to.subspan(part.first_block, part.blocks), body);
  std::vector<ContentRange> ranges;
  for (const BlockStrip& strip : part.strips) ranges.push_back({strip.from, strip.bytes});
  std::vector<iovec> pieces;
  ContentPlan(route_.local_, ranges).emit(request_.from.subspan(part.first_block, part.blocks), true, pieces);
  route_.link_->send_data(request_.transfer, body, pieces, request_.deadline_ns, request_.cancelled);
  outcome_.calls += pieces.size();
  outcome_.bytes += part.bytes();
  if (request_.bytes_done != nullptr) request_.bytes_done->fetch_add(part.bytes(), std::memory_order_relaxed);
}

SimRoute::SimRoute(SimClock& clock, const SimFaults& faults, const SimWatch& watch, SimClock::Actor writer,
                   bool one_sided, const MediaSpans& local, const MediaSpans& peer, std::shared_ptr<SimLink> link)
    : clock_(clock),
      faults_(faults),
      watch_(watch),
      writer_(writer),
      one_sided_(one_sided),
      local_(local),
      peer_(peer),
      link_(std::move(link)) {}

double SimRoute::estimate_us(const MediaSet& /*from*/, const MediaSet& /*to*/, const WriteSize& size,
                             std::int64_t /*now_ns*/) const noexcept {
  return one_sided_ ? static_cast<double>(size.pieces) : static_cast<double>(size.bytes);
}

WriteOutcome SimRoute::write(const WriteRequest& request) {
  SimWrite write(*this, request);
  while (!write.step()) {
  }
  return write.outcome();
}

}  // namespace kvpool
