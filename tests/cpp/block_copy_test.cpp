#include "kvpool/blocks/block_copy.h"

#include <doctest/doctest.h>

#include "block_memory.h"
#include "lent_team.h"

namespace kvpool {
namespace {

using testing::BlockMemory;
using testing::Dice;

std::shared_ptr<Arena> arena_of(Medium medium, const BlockMemory& memory) {
  const MediumSpan& span = memory.spans()[medium];
  return make_adopted_arena(medium, span.blocks, span.segments, nullptr);
}

TEST_CASE("a copier moves whole blocks between arenas, however each cuts them") {
  testing::LentTeam team(2);
  for (const std::uint64_t seed : testing::fuzz_seeds()) {
    testing::announce_fuzz("block copy", seed);
    Dice dice(seed);
    for (int round = 0; round < testing::fuzz_length(40); ++round) {
      CAPTURE(seed);
      CAPTURE(round);
      const std::uint32_t blocks = 1 + dice.below(60);
      const std::size_t bytes = dice.one_in(8) ? 100'000 + dice.below(1000) : 1 + dice.below(300);
      BlockMemory memory = BlockMemory::random(dice, blocks, bytes);
      const BlockMemory expected(memory);
      std::vector<Address> from;
      std::vector<Address> to;
      for (const Address block : testing::random_blocks(dice, blocks, 2 * blocks)) {
        auto& list = medium_bits_of(block) == static_cast<std::uint32_t>(Medium::kHbm) ? from : to;
        list.push_back(block);
      }
      from.resize(dice.below(blocks + 1));
      to.resize(from.size());
      testing::naive_write(expected.spans(), expected.spans(), {BlockStrip{0, 0, bytes}}, from, to);
      const auto hbm = arena_of(Medium::kHbm, memory);
      const auto dram = arena_of(Medium::kDram, memory);
      BlockCopier(*hbm, *dram).run(team, from.data(), to.data(), from.size());
      CHECK(memory == expected);
    }
  }
}

TEST_CASE("a copier of arenas without blocks has nothing to do") {
  ArenaOptions options;
  options.blocks = 0;
  options.segment_bytes = {64, 64};
  const auto empty = make_owned_arena(options);
  CopyTeam team;
  BlockCopier(*empty, *empty).run(team, nullptr, nullptr, 0);
  CHECK(empty->payload_bytes() == 0);
}

}  // namespace
}  // namespace kvpool
