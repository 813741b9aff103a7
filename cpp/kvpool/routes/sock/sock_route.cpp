#include "kvpool/routes/sock/sock_route.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "kvpool/base/clock.h"
#include "kvpool/cuda/staging.h"
#include "kvpool/net/data_body.h"
#include "kvpool/net/reactor.h"
#include "kvpool/routes/route_choice.h"
#include "kvpool/routes/route_cost.h"
#include "kvpool/routes/write_in_parts.h"
#include "kvpool/routes/write_timer.h"

namespace kvpool {
namespace {

// Pieces of a frame that are shorter than this on average are gathered: 1,024 of 512 bytes take 64 us on a Unix socket
// so, and 95 us by a list; of 2,048 bytes 358 and 280 (bench/transfer/descriptors.cpp).
constexpr std::size_t kGatherBelowBytes = 1024;

static_assert(kDataBytesMax <= DeviceStaging::kBufferBytes, "a frame is gathered in one buffer");

// What is needed to make frames; kept from one to the next.
class FrameMaker {
 public:
  // `staging`: of blocks that the CPU cannot read; else null.
  FrameMaker(const WriteRequest& request, const MediaSpans& local, DeviceStaging* staging)
      : request_(request), local_(local), staging_device_(staging) {
    if (staging != nullptr) buffer_ = staging->buffer();
  }

  void make(const TransferPart& part) {
    body_.clear();
    write_data_body(part.strips, request_.to.subspan(part.first_block, part.blocks), body_);
    ranges_.clear();
    for (const BlockStrip& strip : part.strips) ranges_.push_back(ContentRange{strip.from, strip.bytes});
    pieces_.clear();
    ContentPlan(local_, ranges_).emit(request_.from.subspan(part.first_block, part.blocks), request_.merge, pieces_);
    listed_ += pieces_.size();
    const std::uint64_t bytes = part.bytes();
    if (buffer_ != nullptr) {
      staging_device_->gather(pieces_, buffer_->data());
      pieces_.assign(1, iovec{buffer_->data(), static_cast<std::size_t>(bytes)});
      return;
    }
    if (pieces_.size() > 1 && bytes < pieces_.size() * kGatherBelowBytes) gather(bytes);
  }

  std::span<const std::byte> body() const noexcept { return body_; }
  std::span<const iovec> pieces() const noexcept { return pieces_; }
  // Of all frames.
  std::uint64_t listed() const noexcept { return listed_; }

 private:
  void gather(std::uint64_t bytes) {
    staging_.resize(bytes);
    std::byte* next = staging_.data();
    for (const iovec& piece : pieces_) {
      std::memcpy(next, piece.iov_base, piece.iov_len);
      next += piece.iov_len;
    }
    pieces_.assign(1, iovec{staging_.data(), staging_.size()});
  }

  const WriteRequest& request_;
  const MediaSpans& local_;
  DeviceStaging* const staging_device_;
  std::shared_ptr<PinnedBuffer> buffer_;  // in use until the frame is sent
  Bytes body_;
  Bytes staging_;
  std::vector<ContentRange> ranges_;
  std::vector<iovec> pieces_;
  std::uint64_t listed_ = 0;
};

PartLimits frame_limits(const WriteRequest& request, std::uint64_t bytes_max) noexcept {
  if (!request.gather) return {.bytes_max = bytes_max, .blocks_max = 1, .strips_max = 1, .pieces_max = 1};
  return {
      .bytes_max = bytes_max, .blocks_max = kDataBlocksMax, .strips_max = kDataRangesMax, .pieces_max = kDataPiecesMax};
}

// A call is a frame, as long as frames may be. A strip of a block that takes several is one call.
std::uint64_t count_calls(const WriteRequest& request) {
  const std::uint64_t strips = request.strips.size() * request.from.size();
  if (!request.gather) return strips;
  const TransferParts frames(request.strips, request.from.size(), frame_limits(request, kDataBytesMax));
  return std::min<std::uint64_t>(strips, frames.size());
}

class SockRoute final : public Route {
 public:
  SockRoute(MediaSpans local, std::shared_ptr<void> keepalive, std::shared_ptr<Link> link,
            std::shared_ptr<DeviceStaging> staging, MediaSet on_gpu)
      : local_(std::move(local)),
        keepalive_(std::move(keepalive)),
        link_(std::move(link)),
        staging_(std::move(staging)),
        on_gpu_(on_gpu) {}

  const char* name() const noexcept override { return "sock"; }
  RouteTraits traits() const noexcept override { return {.one_sided = false, .by_caller = true, .waits = true}; }
  bool reaches(Medium) const noexcept override { return true; }
  double estimate_us(const MediaSet& from, const MediaSet& to, const WriteSize& size,
                     std::int64_t now_ns) const noexcept override {
    return cost_.estimate_us(from, to, size, now_ns);
  }
  RouteCost* cost() noexcept override { return &cost_; }
  bool wants_other_thread() noexcept override { return link_->would_queue(); }

  WriteOutcome write(const WriteRequest& request) override {
    check_sources(request);
    WriteTimer timer(cost_, request);
    FrameMaker maker(request, local_, reads_gpu(request) ? staging_.get() : nullptr);
    WriteOutcome outcome;
    for (std::size_t sent = 0; sent < request.from.size();) sent = send_blocks(request, sent, maker, outcome);
    outcome.calls = count_calls(request);
    outcome.pieces = maker.listed();
    timer.stop(outcome);
    return outcome;
  }

  void close() noexcept override { closed_.store(true, std::memory_order_relaxed); }

 private:
  // Sends blocks from this one on, for as long as the link wants frames of about the same length. Returns which one is
  // next.
  std::size_t send_blocks(const WriteRequest& request, std::size_t first, FrameMaker& maker, WriteOutcome& outcome) {
    const PartLimits limits = frame_limits(request, frame_bytes_max());
    const TransferParts frames(request.strips, request.from.size() - first, limits);
    if (frames.size() == 0) return request.from.size();
    std::size_t next = first;
    for (std::size_t i = 0; i < frames.size(); ++i) {
      TransferPart frame = frames[i];
      frame.first_block += first;
      const bool whole_blocks = frame.first_block >= next;  // of those before, every frame was sent
      if (whole_blocks && i > 0 && is_far(limits.bytes_max, frame_bytes_max())) return frame.first_block;
      throw_if_stopped(request, name(), closed_);
      maker.make(frame);
      link_->send_data(request.transfer, maker.body(), maker.pieces(), request.deadline_ns, request.cancelled);
      next = frame.first_block + frame.blocks;
      outcome.bytes += frame.bytes();
      if (request.bytes_done != nullptr) {
        request.bytes_done->fetch_add(frame.bytes(), std::memory_order_relaxed);
      }
    }
    return next;
  }

  std::uint64_t frame_bytes_max() const noexcept { return std::min(kDataBytesMax, link_->payload_bytes_wanted()); }
  static bool is_far(std::uint64_t one, std::uint64_t other) noexcept {
    return one > 2 * other || other > 2 * one || (other == kDataBytesMax && one != other);
  }

  bool reads_gpu(const WriteRequest& request) const noexcept {
    const MediaSet from = media_set_of(request.from);
    return (from[0] && on_gpu_[0]) || (from[1] && on_gpu_[1]);
  }

  void check_sources(const WriteRequest& request) const {
    if (request.from.size() == request.to.size() && blocks_exist(request.from, local_)) return;
    throw Error(ErrorCode::kArgument, "a block to write from does not exist");
  }

  const MediaSpans local_;
  const std::shared_ptr<void> keepalive_;
  const std::shared_ptr<Link> link_;
  const std::shared_ptr<DeviceStaging> staging_;
  const MediaSet on_gpu_;
  RouteCost cost_{kSockPrior, kSockCallUs};
  std::atomic<bool> closed_{false};
};

}  // namespace

std::unique_ptr<Route> make_sock_route(MediaSpans local, std::shared_ptr<void> keepalive, std::shared_ptr<Link> link,
                                       std::shared_ptr<DeviceStaging> staging, MediaSet on_gpu) {
  return std::make_unique<SockRoute>(std::move(local), std::move(keepalive), std::move(link), std::move(staging),
                                     on_gpu);
}

}  // namespace kvpool
