// Logical instances whose ranks, on fake GPUs, send to each other by NCCL.
#include <doctest/doctest.h>

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "block_memory.h"
#include "fake_nccl.h"
#include "fuzz_seeds.h"
#include "kvpool/ranks/group_route.h"
#include "kvpool/ranks/rank_set.h"
#include "rank_on_gpu.h"
#include "reshard_model.h"

#ifdef KVPOOL_FAKE_CUDA

namespace kvpool::testing {
namespace {

constexpr std::uint64_t kMeeting = 5;
constexpr std::uint32_t kRankBlocks = 8;
constexpr std::uint32_t kRanksMax = 4;  // of an instance

// The ranks of an instance, each on a GPU to itself, as their schedulers would use them: NCCL joins no two on one.
class Instance {
 public:
  Instance(std::uint32_t number, const Sharding& sharding, const Parallel& parallel, bool aggregated)
      : sharding_(sharding), parallel_(parallel) {
    for (std::uint32_t rank = 0; rank < sharding.ranks(); ++rank) {
      RankSpec spec = on_gpu(static_cast<int>(number * kRanksMax + rank));
      spec.instance = number;
      spec.pieces = sharding.rank_layout(rank, aggregated).piece_bytes;
      spec.aggregated = aggregated;
      spec.dram_blocks = kRankBlocks;
      ranks_.push_back(std::make_unique<RankHere>(rank, std::vector<std::string>{"nccl"}, spec));
    }
  }
  const Sharding& sharding() const { return sharding_; }
  void meet(Instance& peer) {
    std::vector<MetadataRank> metadata;
    for (const auto& rank : peer.ranks_) metadata.push_back(rank->metadata());
    for (const auto& rank : ranks_) rank->channels.meet(meeting_of(kMeeting, metadata), in_seconds(60));
  }
  std::unique_ptr<Route> route_to(const Instance& peer) {
    std::vector<std::unique_ptr<RankWriter>> writers;
    for (const auto& rank : ranks_) {
      writers.push_back(std::move(make_local_rank_set(rank->channels)->writers(kMeeting).front()));
    }
    return make_group_route(std::make_shared<const ReshardPlan>(plan_reshard(sharding_, peer.sharding_)),
                            std::move(writers));
  }
  // Each rank's part of a block with these bytes.
  void put(const FakeCuda& cuda, Address address, const std::vector<std::byte>& whole) const {
    each_byte(cuda, address, [&](std::byte& byte, std::uint32_t number) { byte = whole[number]; });
  }
  // How many bytes of all ranks are not as in the whole block.
  std::size_t wrong(const FakeCuda& cuda, Address address, const std::vector<std::byte>& whole) const {
    std::size_t wrong = 0;
    each_byte(cuda, address, [&](const std::byte& byte, std::uint32_t number) { wrong += byte != whole[number]; });
    return wrong;
  }

 private:
  template <class Call>
  void each_byte(const FakeCuda& cuda, Address address, const Call& call) const {
    for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) {
      const MediaSpans spans = host_view(cuda, *ranks_[rank]);
      const Bytes32 numbers = shard(sharding_.shape(), parallel_, rank);
      for (std::size_t at = 0; at < numbers.size(); ++at) {
        call(content_byte(span_of(spans, address), block_of(address), at), numbers[at]);
      }
    }
  }

  const Sharding sharding_;
  const Parallel parallel_;
  std::vector<std::unique_ptr<RankHere>> ranks_;
};

std::vector<std::byte> random_block(Dice& dice, const KVShape& shape) {
  std::vector<std::byte> whole(shape.block_bytes());
  for (std::byte& byte : whole) byte = static_cast<std::byte>(dice.below(256));
  return whole;
}

Address block_at(Medium medium, std::uint32_t block) { return make_address(1, medium, 0, block); }

// These blocks, which are filled anew, arrive bit for bit.
void check_group_write(const FakeCuda& cuda, Dice& dice, Instance& from, Instance& to) {
  const KVShape& shape = from.sharding().shape();
  const std::vector<Address> sources = {block_at(Medium::kHbm, 4), block_at(Medium::kHbm, 5),
                                        block_at(Medium::kDram, 0), block_at(Medium::kHbm, 1)};
  const std::vector<Address> targets = {block_at(Medium::kHbm, 0), block_at(Medium::kDram, 3),
                                        block_at(Medium::kDram, 4), block_at(Medium::kHbm, 7)};
  // Once in one medium on each side, once in both.
  for (const std::size_t count : {std::size_t{1}, std::size_t{2}, sources.size()}) {
    std::vector<std::vector<std::byte>> wholes;
    for (std::size_t i = 0; i < count; ++i) {
      wholes.push_back(random_block(dice, shape));
      from.put(cuda, sources[i], wholes[i]);
      to.put(cuda, targets[i], random_block(dice, shape));
    }
    const BlockStrip all{0, 0, shape.block_bytes()};
    WriteRequest request;
    request.transfer = count;
    request.strips = {&all, 1};
    request.from = std::span(sources).first(count);
    request.to = std::span(targets).first(count);
    request.deadline_ns = in_seconds(60);
    const std::unique_ptr<Route> route = from.route_to(to);
    CHECK(route->write(request).bytes >= count * shape.block_bytes());
    for (std::size_t i = 0; i < count; ++i) CHECK(to.wrong(cuda, targets[i], wholes[i]) == 0);
  }
}

TEST_CASE("nccl ranks: TP 1, 2 and 4 send each other the whole cache, bit for bit") {
  const FakeCuda cuda;
  const FakeNccl nccl;
  cuda.set("devices", 2 * kRanksMax);
  cuda.set("delay_us", 10);
  Dice dice(11);
  const KVShape shape = shape_of(3, 4, 8);
  for (const auto& [tp, tp_peer] : {std::pair(1U, 2U), std::pair(1U, 4U), std::pair(2U, 4U)}) {
    CAPTURE(tp);
    CAPTURE(tp_peer);
    const Parallel parallel = parallel_of(tp, 1);
    const Parallel of_peer = parallel_of(tp_peer, 1);
    Instance a(0, Sharding(shape, parallel), parallel, true);
    Instance b(1, Sharding(shape, of_peer), of_peer, false);
    a.meet(b);
    check_group_write(cuda, dice, a, b);
    check_group_write(cuda, dice, b, a);
  }
  CHECK(nccl.count("mismatches") == 0);
  CHECK(nccl.count("messages") > 0);
  CHECK(cuda.count("pageable") == 0);
}

TEST_CASE("nccl ranks: every rank of two stages sends to every rank of TP 2, both ways at once") {
  const FakeCuda cuda;
  const FakeNccl nccl;
  cuda.set("devices", 2 * kRanksMax);
  cuda.set("delay_us", 10);
  const KVShape shape = shape_of(4, 2, 8);
  const Parallel stages = parallel_of(1, 2);
  const Parallel heads = parallel_of(2, 1);
  Instance a(0, Sharding(shape, stages), stages, true);
  Instance b(1, Sharding(shape, heads), heads, true);
  a.meet(b);
  Dice dice(12);
  const BlockStrip all{0, 0, shape.block_bytes()};
  const auto write = [&](Instance& from, Instance& to, const std::vector<Address>& blocks) {
    const std::unique_ptr<Route> route = from.route_to(to);
    for (std::uint64_t i = 0; i < 6; ++i) {
      WriteRequest request;
      request.transfer = i;
      request.strips = {&all, 1};
      request.from = blocks;
      request.to = blocks;
      request.deadline_ns = in_seconds(60);
      route->write(request);
    }
  };
  const std::vector<Address> forth = {block_at(Medium::kHbm, 0), block_at(Medium::kHbm, 2)};
  const std::vector<Address> back = {block_at(Medium::kHbm, 5), block_at(Medium::kHbm, 6)};
  const auto whole_forth = random_block(dice, shape);
  const auto whole_back = random_block(dice, shape);
  for (const Address address : forth) a.put(cuda, address, whole_forth);
  for (const Address address : back) b.put(cuda, address, whole_back);
  std::thread other([&] { write(b, a, back); });
  write(a, b, forth);
  other.join();
  for (const Address address : forth) CHECK(b.wrong(cuda, address, whole_forth) == 0);
  for (const Address address : back) CHECK(a.wrong(cuda, address, whole_back) == 0);
  CHECK(nccl.count("ncclCommInitRankConfig") == 16);  // for each of four pairs and each direction, both ends
}

}  // namespace
}  // namespace kvpool::testing

#endif  // KVPOOL_FAKE_CUDA
