// The channels of one rank to the ranks of its peers, and the writes on them. A rank of a logical instance keeps them
// in its own process (rank_node.h); a pool that is an instance of one rank keeps them beside its service (rank_set.h).
//
// Channels belong to a meeting of two schedulers, named by a number that is never reused. When the schedulers
// disconnect, each tells its ranks to depart from the meeting, and is told when no rank writes in it any more.
//
// Invariants
//   N3  An order reports once, when every channel of it has ended its part (N1).
//   N4  After depart(), no channel of that meeting begins; a late connection to it is refused.
//
// Thread-safety: all of it. Callbacks come from any thread, and none is called with a lock held.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "kvpool/cuda/order.h"
#include "kvpool/exec/serial_executor.h"
#include "kvpool/net/connect/endpoint.h"
#include "kvpool/peers/route_maker.h"
#include "kvpool/peers/writer_quarantine.h"
#include "kvpool/ranks/rank_channel.h"
#include "kvpool/ranks/rank_group.h"
#include "kvpool/ranks/rank_messages.h"

namespace kvpool {

// Parts of blocks to write, channel by channel. `request` has the blocks and the deadline; its strips, flag and counter
// are ignored.
struct ChannelOrder {
  std::uint64_t meeting = 0;
  std::span<const ChannelWrite> channels;
  WriteRequest request;
  std::shared_ptr<const void> keep;          // all that the above points to
  std::shared_ptr<const DeviceOrder> after;  // to wait for before the blocks are read; null: nothing
  std::shared_ptr<std::atomic<bool>> stop;
  std::function<void(const WriteOutcome& outcome, const Error* error)> report;
};

class RankChannels {
 public:
  // All arguments outlive this object. `waits` carries out parts of orders, which wait for peers; `watches`, of
  // WriterQuarantine::kWatchLimits, ends parked parts in time however many of those wait. start() sets the endpoint
  // from which it connects, which is made after this object.
  RankChannels(RouteMaker& routes, SerialExecutor& waits, SerialExecutor& watches, WriterQuarantine& writer_quarantine)
      : routes_(routes),
        waits_(waits),
        watches_(watches),
        writer_quarantine_(writer_quarantine),
        spans_(routes.memory().spans()) {}
  void start(Endpoint& endpoint) noexcept { endpoint_ = &endpoint; }
  // Sets the function to call, from any thread, when the GPU of this memory is lost. Call it before the first channel.
  void on_device_lost(std::function<void(const Error& why)> call) { on_device_lost_ = std::move(call); }

  // Connects to these ranks of a peer. Throws what Endpoint::connect throws, and kPeerLost when another process answers
  // or the meeting is over; channels made so far stay until depart().
  void meet(const MeetBody& body, const Waiting& waiting);
  // Admits a rank of a peer, which has connected or was connected to. Throws as Endpoint::Admit, and kBusy as long as
  // writes of an earlier meeting to this incarnation are under way. So once both sides have admitted each other, no
  // such writes are left.
  std::shared_ptr<LinkHandler> admit(const std::shared_ptr<Link>& link, const PeerMetadata& metadata);

  // Carries out the order and reports. Parts for channels that are not connected yet wait for them until the order's
  // deadline, and have no threads meanwhile. Throws std::bad_alloc; then nothing is written, and nothing reported.
  void write(ChannelOrder&& order);

  // Ends this side's writes soon. Calls `clear` once neither side writes in this meeting any more.
  void depart(std::uint64_t meeting, const Error& why, std::function<void()> clear);
  // Ends the links of channels that are not over. The writer quarantine then waits for the proof that their peers no
  // longer write.
  void abandon() noexcept;
  // Departs from all meetings. From now on no channel begins.
  void depart_all(const Error& why, std::function<void()> clear);

 private:
  struct Slot {
    std::shared_ptr<RankChannel> channel;
  };
  struct Meeting {
    std::map<std::uint32_t, std::shared_ptr<Slot>> slots;  // by rank of the peer
    std::optional<Error> why_over;
    std::vector<std::function<void()>> clears;
  };
  struct Job;
  struct Parked {  // a part that waits for its channel
    std::shared_ptr<Slot> slot;
    std::shared_ptr<Job> job;
    const ChannelWrite* part;
  };

  static constexpr std::size_t kPastMax = 4096;  // meetings that are over and remembered

  void connect(const MeetBody& body, const MetadataRank& rank, const Waiting& waiting);
  std::shared_ptr<RankChannel> channel_to(std::uint64_t meeting, const MetadataRank& rank);
  void check_return_locked(const PeerMetadata& metadata) const;
  std::shared_ptr<Slot> slot_locked(std::uint64_t meeting, std::uint32_t rank);
  std::shared_ptr<RankChannel> channel_of(const Job& job, std::uint32_t rank);
  void begin_part(const Parked& one);
  void write_part(const std::shared_ptr<Job>& job, const ChannelWrite& part);
  template <class Which>
  std::list<Parked> take_parked_locked(Which&& which) noexcept;
  void watch_parked();
  void check_part(const RankChannel& channel, const Job& job, const ChannelWrite& part) const;
  bool is_past_locked(std::uint64_t meeting) const noexcept;
  void look_at_meetings();

  RouteMaker& routes_;
  SerialExecutor& waits_;
  SerialExecutor& watches_;
  WriterQuarantine& writer_quarantine_;
  Endpoint* endpoint_ = nullptr;
  const MediaSpans spans_;
  std::function<void(const Error&)> on_device_lost_ = [](const Error&) {};

  std::mutex mutex_;
  std::condition_variable changed_;  // fewer parts are parked
  std::unordered_map<std::uint64_t, Meeting> meetings_;
  std::list<Parked> parked_;
  bool watched_ = false;  // a thread looks for parked parts whose time is over
  std::deque<std::uint64_t> past_;
  std::optional<Error> why_closed_;
  std::vector<std::function<void()>> all_clears_;
};

}  // namespace kvpool
