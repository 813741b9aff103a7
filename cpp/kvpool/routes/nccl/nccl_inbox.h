// The receiving half of the nccl route: joins the communicators that the peer opens, and receives what it announces.
//
// Invariants
//   U1  The inbox receives content only into blocks that the sender could write when it announced the content. These
//       blocks are not freed before the content has arrived or the pipe is shut: Receiver keeps reservations, and
//       defer() delays all other frees.
//   U2  The inbox answers each announced pass once, unless the link ends first.
//   U3  At most one thread works here at a time, and only while there is work. After each piece of work the inboxes of
//       other peers have their turn. A piece takes at most `init_ns` (a communicator) or `pass_ns` (a pass).
//   U5  What waits here is bounded: kNcclPassesMax passes, kNcclChannelsMax communicators, and of deferred work what
//       its giver allows.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <variant>

#include "kvpool/routes/nccl/nccl_messages.h"
#include "kvpool/routes/nccl/nccl_pipe.h"
#include "kvpool/routes/route_receiver.h"

namespace kvpool {

class NcclInbox final : public RouteReceiver, public std::enable_shared_from_this<NcclInbox> {
 public:
  NcclInbox(const NcclMemory& memory, std::weak_ptr<Link> link, RouteRun run);

  using RouteReceiver::begin;
  void begin(Admit admit, Placed placed, Lost lost) override;
  void on_message(Message&& message) override;  // except kPassed, which goes to the sending half
  bool defer(std::function<void()>& work) override;
  void close(std::function<void()> on_closed) noexcept override;
  // Soon gives up the content that is arriving, and receives nothing more.
  void stop() noexcept { closed_.store(true); }

 private:
  struct Pass {
    NcclPassBody body;
    std::uint64_t transfer = 0;
    std::uint64_t token = 0;
    bool admitted = false;
    std::int64_t deadline_ns = 0;
  };
  using Work = std::variant<NcclChannelBody, Pass, std::function<void()>>;

  void announce(Message&& message);
  void push(Work&& work);
  void make_room(const Work& work);
  void work_off() noexcept;
  void carry_out_next(std::unique_lock<std::mutex>& lock) noexcept;
  bool goes_on_later() noexcept;
  void carry_out(Work& work) noexcept;
  void open(const NcclChannelBody& channel);
  NcclPassedBody receive(Pass& pass) noexcept;
  void note(const std::exception& failure, NcclPassedBody& outcome) noexcept;
  void check(std::uint64_t generation, std::int64_t deadline_ns) const;
  void answer(std::uint64_t id, const NcclPassedBody& body) noexcept;

  const MediaSpans local_;
  const std::int64_t init_ns_;
  const std::int64_t pass_ns_;
  const std::weak_ptr<Link> link_;
  const RouteRun run_;
  Admit admit_;
  Placed placed_;
  Lost lost_;
  std::uint64_t announced_ = 0;  // only the thread that reads the link uses this and the next
  std::uint64_t pass_bytes_max_ = kNcclPassBytesMax;
  std::atomic<bool> closed_{false};
  std::atomic<std::uint64_t> halted_{0};  // the sender has left the generations up to this one

  std::mutex mutex_;
  std::list<Work> queue_;
  std::function<void()> on_closed_;  // set by close(), called when all work is done
  std::size_t passes_ = 0;           // in the queue, or being received
  std::size_t channels_ = 0;         // in the queue
  bool working_ = false;

  NcclPipe pipe_;                 // only the thread that works here uses this and the next
  std::uint64_t generation_ = 0;  // of the communicator for which pipe_ is open
};

}  // namespace kvpool
