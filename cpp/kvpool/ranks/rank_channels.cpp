#include "kvpool/ranks/rank_channels.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "kvpool/base/clock.h"
#include "kvpool/base/failure.h"
#include "kvpool/base/strips.h"
#include "kvpool/net/reactor.h"
#include "kvpool/transfer/same_blocks.h"

namespace kvpool {
namespace {

// How often the thread that watches parked parts looks at the clock, and whether they are to stop.
constexpr std::chrono::milliseconds kLook{20};
constexpr std::int64_t kRetryAfterUs = 10'000;

}  // namespace

// --- channels come ---

void RankChannels::meet(const MeetBody& body, const Waiting& waiting) {
  for (const MetadataRank& rank : body.ranks) connect(body, rank, waiting);
}

void RankChannels::connect(const MeetBody& body, const MetadataRank& rank, const Waiting& waiting) {
  const std::string which = "rank " + std::to_string(rank.rank) + " of " + body.peer + " at " + rank.address;
  const auto failure = failure_of([&] {
    const auto link = endpoint_->connect(rank.address, waiting, body.meeting);
    if (const auto channel = channel_to(body.meeting, rank)) return channel->greet(waiting);
    link->close(Error(ErrorCode::kPeerLost, "it was another that was looked for"));
    throw Error(ErrorCode::kPeerLost, "another process answers there now, or it left at once");
  });
  if (failure) throw Error(failure->code(), "no channel to " + which + ": " + failure->what());
}

std::shared_ptr<RankChannel> RankChannels::channel_to(std::uint64_t meeting, const MetadataRank& rank) {
  const std::lock_guard lock(mutex_);
  const auto entry = meetings_.find(meeting);
  if (entry == meetings_.end()) return nullptr;
  const auto slot = entry->second.slots.find(rank.rank);
  const bool there = slot != entry->second.slots.end() && slot->second->channel != nullptr &&
                     slot->second->channel->peer().incarnation == rank.incarnation;
  return there ? slot->second->channel : nullptr;
}

std::shared_ptr<LinkHandler> RankChannels::admit(const std::shared_ptr<Link>& link, const PeerMetadata& metadata) {
  const bool one_rank = metadata.rank_of == 0;
  if (metadata.meeting == 0) throw Error(ErrorCode::kArgument, metadata.name + " belongs to no meeting");
  if (one_rank && metadata.is_group()) {
    throw Error(ErrorCode::kArgument, metadata.name + " is the scheduler of a logical instance: connect to mine");
  }
  check_same_rows(metadata, routes_.memory().layout);
  const auto exposure = routes_.exposure(metadata, link);
  RankChannel::Events events;
  events.on_ended = [this, exposure](const std::shared_ptr<RankChannel>& channel, const std::shared_ptr<Link>& ended) {
    writer_quarantine_.add(channel, ended, exposure);
    look_at_meetings();
  };
  events.on_changed = [this](const RankChannel& changed) {
    if (changed.writes_under_way() == 0) writer_quarantine_.on_drained(changed);
    look_at_meetings();
  };
  // It has admitted this side, which it does only when it has ended what it wrote in earlier meetings.
  events.on_heard = [this](const RankChannel& heard) { writer_quarantine_.on_writer_gone(heard.peer().incarnation); };
  events.on_device_lost = [this](const Error& why) { on_device_lost_(why); };
  events.run_aside = [this](const void* key, std::function<void()> work) {
    waits_.run(key, Priority::kBackground, std::move(work));
  };
  RankChannel::Memory memory{spans_,
                             [this](std::span<const Address> blocks, std::vector<iovec>& pieces, std::uint64_t bytes) {
                               return routes_.staging_buffer(blocks, pieces, bytes);
                             }};
  const auto channel = std::make_shared<RankChannel>(std::move(memory), metadata, exposure.any(), std::move(events));
  channel->start(link, routes_.make(metadata, link));

  std::list<Parked> parked;
  {
    const std::lock_guard lock(mutex_);
    if (why_closed_) throw Error(*why_closed_);
    if (is_past_locked(metadata.meeting)) throw Error(ErrorCode::kPeerLost, "that meeting is over");
    check_return_locked(metadata);
    const auto slot = slot_locked(metadata.meeting, one_rank ? 0 : metadata.rank);
    if (slot->channel != nullptr) throw Error(ErrorCode::kState, "there is a channel to " + metadata.name + " already");
    slot->channel = channel;
    parked = take_parked_locked([&](const Parked& one) { return one.slot == slot; });
  }
  for (const Parked& one : parked) begin_part(one);
  return channel;
}

void RankChannels::check_return_locked(const PeerMetadata& metadata) const {
  writer_quarantine_.check_return(metadata.incarnation);
  for (const auto& [number, meeting] : meetings_) {
    for (const auto& [rank, slot] : meeting.slots) {
      const RankChannel* const channel = slot->channel.get();
      if (channel == nullptr || !meeting.why_over || channel->peer().incarnation != metadata.incarnation) continue;
      if (channel->writes_under_way() == 0) continue;
      throw Error(ErrorCode::kBusy, "writes of an earlier meeting with " + metadata.name + " are not over",
                  {{"retry_after_us", kRetryAfterUs}});
    }
  }
}

bool RankChannels::is_past_locked(std::uint64_t meeting) const noexcept {
  const auto entry = meetings_.find(meeting);
  if (entry != meetings_.end() && entry->second.why_over) return true;
  return std::ranges::find(past_, meeting) != past_.end();
}

std::shared_ptr<RankChannels::Slot> RankChannels::slot_locked(std::uint64_t meeting, std::uint32_t rank) {
  auto& slot = meetings_[meeting].slots[rank];
  if (slot == nullptr) slot = std::make_shared<Slot>();
  return slot;
}

// --- orders ---

struct RankChannels::Job {
  explicit Job(ChannelOrder&& from) : order(std::move(from)), missing(order.channels.size()) {}

  void take(const WriteOutcome& outcome, const std::optional<Error>& error) {
    bool last = false;
    {
      const std::lock_guard lock(mutex);
      sum.calls += outcome.calls;
      sum.bytes += outcome.bytes;
      if (error) {
        // A channel that is broken may still write: no other failure, which would say that nothing is, hides it.
        if (!failure || error->code() == ErrorCode::kPeerLost) failure = error;
        order.stop->store(true, std::memory_order_relaxed);  // the other channels'
      }
      last = --missing == 0;
    }
    if (last) order.report(sum, failure ? &*failure : nullptr);
  }

  // Once for all channels, though each comes here.
  void wait_for_gpu() {
    if (order.after == nullptr) return;
    const std::lock_guard lock(order_mutex);
    if (!in_order) order.after->wait(order.request.deadline_ns, order.stop.get());
    in_order = true;
  }

  const ChannelOrder order;
  std::mutex order_mutex;
  bool in_order = false;  // under order_mutex
  std::mutex mutex;
  std::size_t missing;
  WriteOutcome sum;
  std::optional<Error> failure;  // the first, or one that says kPeerLost
};

void RankChannels::write(ChannelOrder&& order) {
  const auto job = std::make_shared<Job>(std::move(order));
  if (job->order.channels.empty()) return job->order.report({}, nullptr);
  std::list<Parked> parts;
  bool watch = false;
  {
    std::list<Parked> waiting;
    const std::lock_guard lock(mutex_);
    const bool past = why_closed_ || is_past_locked(job->order.meeting);
    for (const ChannelWrite& part : job->order.channels) {
      auto slot = past ? std::make_shared<Slot>() : slot_locked(job->order.meeting, part.to_rank);
      auto& where = past || slot->channel != nullptr ? parts : waiting;
      where.push_back({std::move(slot), job, &part});
    }
    if (!waiting.empty()) watch = !std::exchange(watched_, true);
    parked_.splice(parked_.end(), waiting);
  }
  for (const Parked& one : parts) begin_part(one);
  if (!watch) return;
  if (const auto failure = failure_of([&] { watches_.run(&parked_, Priority::kDecode, [this] { watch_parked(); }); })) {
    std::list<Parked> unwatched;
    {
      const std::lock_guard lock(mutex_);
      watched_ = false;
      unwatched.swap(parked_);
    }
    for (const Parked& one : unwatched) one.job->take({}, failure);
  }
}

void RankChannels::begin_part(const Parked& one) {
  const auto failure = failure_of(
      [&] { waits_.run(one.slot.get(), Priority::kPrefill, [this, one] { write_part(one.job, *one.part); }); });
  if (failure) one.job->take({}, failure);
}

// REQUIRES: mutex_ is held.
template <class Which>
std::list<RankChannels::Parked> RankChannels::take_parked_locked(Which&& which) noexcept {
  std::list<Parked> taken;
  for (auto one = parked_.begin(); one != parked_.end();) {
    const auto current = one++;
    if (which(*current)) taken.splice(taken.end(), parked_, current);
  }
  return taken;
}

// One thread for all parts that wait: it ends those that are stopped, or too late. Their channels begin the others.
void RankChannels::watch_parked() {
  std::unique_lock lock(mutex_);
  while (!parked_.empty()) {
    const std::int64_t now_ns = monotonic_ns();
    const auto is_stopped = [](const Parked& one) { return one.job->order.stop->load(std::memory_order_relaxed); };
    std::list<Parked> over = take_parked_locked(
        [&](const Parked& one) { return is_stopped(one) || now_ns >= one.job->order.request.deadline_ns; });
    if (over.empty()) {
      changed_.wait_for(lock, kLook);
      continue;
    }
    lock.unlock();
    for (const Parked& one : over) {
      one.job->take({}, failure_of([&] {
                      if (is_stopped(one)) throw Error(ErrorCode::kCancelled, "stopped");
                      throw Error(ErrorCode::kDeadline, "there is no channel to rank " +
                                                            std::to_string(one.part->to_rank) + " of the peer yet");
                    }));
    }
    over.clear();  // what the parts hold is released without the lock
    lock.lock();
  }
  watched_ = false;
}

void RankChannels::write_part(const std::shared_ptr<Job>& job, const ChannelWrite& part) {
  WriteOutcome outcome;
  const auto failure = failure_of([&] {
    const auto channel = channel_of(*job, part.to_rank);
    check_part(*channel, *job, part);
    job->wait_for_gpu();
    WriteRequest request = job->order.request;
    request.strips = part.strips;
    request.cancelled = job->order.stop.get();
    request.bytes_done = nullptr;
    outcome = channel->write(request);
  });
  job->take(outcome, failure);
}

// Throws the reason why the meeting has no channels any more.
std::shared_ptr<RankChannel> RankChannels::channel_of(const Job& job, std::uint32_t rank) {
  const std::lock_guard lock(mutex_);
  if (why_closed_) throw Error(*why_closed_);
  const auto entry = meetings_.find(job.order.meeting);
  if (entry == meetings_.end()) throw Error(ErrorCode::kPeerLost, "the meeting with the peer is over");
  if (entry->second.why_over) throw Error(*entry->second.why_over);
  return entry->second.slots.at(rank)->channel;
}

// An order comes from the own scheduler, but what the peer's rank says of its blocks does not.
void RankChannels::check_part(const RankChannel& channel, const Job& job, const ChannelWrite& part) const {
  const auto fail = [&](const char* what) {
    throw Error(ErrorCode::kArgument,
                std::string(what) + " (to rank " + std::to_string(part.to_rank) + ", " + channel.peer().name + ")");
  };
  if (!blocks_exist(job.order.request.from, spans_)) fail("a block to write from does not exist in this rank");
  const auto& media = channel.peer().media;
  for (const Address address : job.order.request.to) {
    const std::uint32_t bits = medium_bits_of(address);
    const bool there = is_medium(bits) && block_of(address) < media[medium_of(address)].blocks;
    if (!there) fail("a block to write to does not exist in the peer's rank");
  }
  for (const Address address : job.order.request.from) {
    const MediumSpan& span = spans_[medium_of(address)];
    if (!strips_fit(part.strips, span.block_bytes(), channel.peer_block_bytes())) {
      fail("the parts to write do not lie within the blocks of both ranks");
    }
    break;  // blocks of one rank have the same length in every medium
  }
}

// --- meetings end ---

void RankChannels::depart(std::uint64_t meeting, const Error& why, std::function<void()> clear) {
  std::vector<std::shared_ptr<RankChannel>> channels;
  std::list<Parked> parked;
  {
    const std::lock_guard lock(mutex_);
    Meeting& entry = meetings_[meeting];
    if (!entry.why_over) entry.why_over = why;
    if (clear) entry.clears.push_back(std::move(clear));
    for (const auto& [rank, slot] : entry.slots) {
      if (slot->channel != nullptr) channels.push_back(slot->channel);
    }
    parked = take_parked_locked([&](const Parked& one) { return one.job->order.meeting == meeting; });
    changed_.notify_all();
  }
  for (const Parked& one : parked) begin_part(one);  // to hear why there is no channel
  for (const auto& channel : channels) channel->depart(why);
  look_at_meetings();
}

void RankChannels::depart_all(const Error& why, std::function<void()> clear) {
  std::vector<std::uint64_t> meetings;
  {
    const std::lock_guard lock(mutex_);
    if (!why_closed_) why_closed_ = why;
    if (clear) all_clears_.push_back(std::move(clear));
    for (const auto& [meeting, entry] : meetings_) meetings.push_back(meeting);
  }
  for (const std::uint64_t meeting : meetings) depart(meeting, why, {});
  look_at_meetings();
}

void RankChannels::abandon() noexcept {
  std::vector<std::shared_ptr<RankChannel>> channels;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [number, meeting] : meetings_) {
      for (const auto& [rank, slot] : meeting.slots) {
        if (slot->channel != nullptr && !slot->channel->over()) channels.push_back(slot->channel);
      }
    }
  }
  for (const auto& channel : channels) channel->abandon();
}

// Removes the meetings that have ended. A meeting that this rank's scheduler has not announced yet ends when all its
// channels have ended.
void RankChannels::look_at_meetings() {
  std::vector<std::function<void()>> clears;
  std::vector<std::shared_ptr<Slot>> ended;  // destroyed without the lock
  {
    const std::lock_guard lock(mutex_);
    for (auto entry = meetings_.begin(); entry != meetings_.end();) {
      Meeting& meeting = entry->second;
      const bool through = std::ranges::all_of(meeting.slots, [&](const auto& slot) {
        return slot.second->channel == nullptr ? meeting.why_over.has_value() : slot.second->channel->over();
      });
      if (!through || (!meeting.why_over && meeting.slots.empty())) {
        ++entry;
        continue;
      }
      for (auto& clear : meeting.clears) clears.push_back(std::move(clear));
      for (auto& [rank, slot] : meeting.slots) ended.push_back(std::move(slot));
      past_.push_back(entry->first);
      if (past_.size() > kPastMax) past_.pop_front();
      entry = meetings_.erase(entry);
    }
    if (why_closed_ && meetings_.empty()) {
      for (auto& clear : all_clears_) clears.push_back(std::move(clear));
      all_clears_.clear();
    }
  }
  for (const auto& clear : clears) clear();
}

}  // namespace kvpool
