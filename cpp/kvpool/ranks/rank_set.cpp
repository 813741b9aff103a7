#include "kvpool/ranks/rank_set.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace kvpool {
namespace {

// The only rank of its instance: orders go to the channels of this process.
class OwnRank final : public RankWriter {
 public:
  OwnRank(RankChannels& channels, std::uint64_t meeting) : channels_(channels), meeting_(meeting) {}

  void write(const RankOrder& order, const WriteRequest& request, Report report) override {
    const auto stop = std::make_shared<std::atomic<bool>>(false);
    const std::uint64_t key = note(request.transfer, stop);
    ChannelOrder channel_order;
    channel_order.meeting = meeting_;
    channel_order.channels = order.channels;
    channel_order.request = request;
    channel_order.stop = stop;
    channel_order.report = [this, key, report = std::move(report)](const WriteOutcome& outcome, const Error* error) {
      forget(key);
      report(outcome, error);
    };
    try {
      channels_.write(std::move(channel_order));
    } catch (...) {
      forget(key);
      throw;
    }
  }

  void stop(std::uint64_t transfer) noexcept override {
    const std::lock_guard lock(mutex_);
    for (const auto& [key, order] : orders_) {
      if (order.first == transfer) order.second->store(true, std::memory_order_relaxed);
    }
  }

  // Orders that come later find their channels departed.
  void close() noexcept override {
    const std::lock_guard lock(mutex_);
    for (const auto& [key, order] : orders_) order.second->store(true, std::memory_order_relaxed);
  }

 private:
  using Stop = std::shared_ptr<std::atomic<bool>>;

  std::uint64_t note(std::uint64_t transfer, const Stop& stop) {
    const std::lock_guard lock(mutex_);
    orders_.emplace(++last_, std::pair(transfer, stop));
    return last_;
  }
  void forget(std::uint64_t key) {
    const std::lock_guard lock(mutex_);
    orders_.erase(key);
  }

  RankChannels& channels_;
  const std::uint64_t meeting_;
  std::mutex mutex_;
  std::uint64_t last_ = 0;
  std::unordered_map<std::uint64_t, std::pair<std::uint64_t, Stop>> orders_;
};

class LocalRankSet final : public RankSet {
 public:
  explicit LocalRankSet(RankChannels& channels) : channels_(channels) {}

  std::vector<std::unique_ptr<RankWriter>> writers(std::uint64_t meeting) override {
    std::vector<std::unique_ptr<RankWriter>> writers;
    writers.push_back(std::make_unique<OwnRank>(channels_, meeting));
    return writers;
  }

  void meet(const GroupMeeting& meeting, const Waiting& waiting) override {
    channels_.meet(MeetBody{meeting.meeting, meeting.peer, 0, meeting.partners(0)}, waiting);
  }

  void depart(std::uint64_t meeting, const Error& why, std::function<void()> clear) override {
    channels_.depart(meeting, why, std::move(clear));
  }

 private:
  RankChannels& channels_;
};

}  // namespace

std::vector<MetadataRank> GroupMeeting::partners(std::uint32_t own_rank) const {
  std::vector<MetadataRank> partners;
  for (const MetadataRank& rank : peer_ranks) {
    const auto gets = [&](const ReshardPair& pair) { return pair.from_rank == own_rank && pair.to_rank == rank.rank; };
    const auto sends = [&](const ReshardPair& pair) { return pair.from_rank == rank.rank && pair.to_rank == own_rank; };
    if (std::ranges::any_of(to_peer->pairs, gets) || std::ranges::any_of(from_peer->pairs, sends)) {
      partners.push_back(rank);
    }
  }
  return partners;
}

std::unique_ptr<RankSet> make_local_rank_set(RankChannels& channels) {
  return std::make_unique<LocalRankSet>(channels);
}

}  // namespace kvpool
