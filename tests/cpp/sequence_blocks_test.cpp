// The blocks of a sequence that lie in one pool are held for reading, and found again by their place.
#include "kvpool/sequences/sequence_blocks.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "fake_driver.h"
#include "kvpool/base/clock.h"
#include "kvpool/sequences/layer_places.h"
#include "sequence_kit.h"
#include "thrown.h"

namespace kvpool::testing {
namespace {

const Waiting kNoWait(0);  // no peer is asked

TEST_CASE("runs of blocks are joined where they meet and cut where blocks are removed") {
  std::mt19937 random(7);  // NOLINT(bugprone-random-generator-seed)
  for (int round = 0; round < 200; ++round) {
    BlockRuns runs;
    std::map<std::uint64_t, Address> model;
    for (int step = 0; step < 40; ++step) {
      const std::uint64_t first = random() % 30;
      const std::uint64_t count = random() % 6;
      if (random() % 3 == 0) {
        std::vector<Address> gone;
        const std::vector<BlockRange> ranges = {{first, count}, {first + count + random() % 3, random() % 4}};
        for (const BlockRange& range : ranges) {
          for (std::uint64_t block = range.first; block < range.end(); ++block) {
            if (model.contains(block)) gone.push_back(model[block]);
            model.erase(block);
          }
        }
        CHECK(runs.remove(ranges) == gone);
        continue;
      }
      std::vector<Address> added(count);
      for (Address& address : added) address = random();
      const bool taken = std::ranges::any_of(
          model, [&](const auto& entry) { return entry.first >= first && entry.first < first + count; });
      CHECK(code_of([&] { runs.add(first, added); }) == (taken ? std::optional(ErrorCode::kArgument) : std::nullopt));
      for (std::uint64_t i = 0; i < count && !taken; ++i) model[first + i] = added[i];
    }
    CHECK(runs.blocks() == model.size());
    std::uint64_t end = 0;
    for (const BlockRuns::Run& run : runs.runs()) {
      CHECK((run.first > end || (run.first == 0 && end == 0)));  // a gap
      end = run.end();
    }
    for (std::uint64_t first = 0; first < 36; ++first) {
      for (std::uint64_t count = 1; count < 5; ++count) {
        std::vector<Address> wanted;
        for (std::uint64_t block = first; block < first + count && model.contains(block); ++block) {
          wanted.push_back(model[block]);
        }
        const auto found = runs.find({first, count});
        CHECK(found.has_value() == (wanted.size() == count));
        if (found) CHECK(std::ranges::equal(*found, wanted));
      }
    }
  }
}

std::shared_ptr<Pool> make_attendable(std::uint32_t hbm, std::uint32_t dram = 0) {
  return std::make_shared<Pool>(attendable(hbm, dram));
}

TEST_CASE("removed blocks are let go when the readings from before have ended") {
  const auto pool = make_attendable(4);
  const Addresses addresses = alloc(*pool, 4);
  const auto blocks = std::make_shared<SequenceBlocks>(*pool, SequenceBlocks::kApplication, false);
  blocks->add(0, addresses);
  pool->free(addresses.data(), 4);
  CHECK(free_blocks(*pool) == 0);
  {
    auto before = std::make_unique<ReadableBlocks>(blocks->read());
    CHECK(blocks->remove({1, 2}) == 2);
    const ReadableBlocks behind = blocks->read();
    CHECK(free_blocks(*pool) == 0);
    CHECK(before->runs->find({0, 4}).has_value());
    CHECK_FALSE(behind.runs->find({1, 1}).has_value());
    before.reset();
    CHECK(free_blocks(*pool) == 2);
    blocks->close();
    CHECK(free_blocks(*pool) == 2);
  }
  CHECK(free_blocks(*pool) == 4);
  CHECK(code_of([&] { blocks->read(); }) == ErrorCode::kState);
  pool->audit();
}

TEST_CASE("an exchange of blocks happens whole or not at all") {
  const auto pool = make_attendable(6);
  const Addresses addresses = alloc(*pool, 4);
  const Addresses stale = alloc(*pool, 1);
  pool->free(stale.data(), 1);
  const auto blocks = std::make_shared<SequenceBlocks>(*pool, SequenceBlocks::kApplication, false);
  blocks->add(0, {addresses.data(), 2});
  const std::vector<SequenceBlocks::Added> bad = {{0, {&addresses[2], 1}}, {1, stale}};
  CHECK(code_of([&] { blocks->exchange({{0, 2}}, bad); }) == ErrorCode::kStaleAddress);
  CHECK(std::ranges::equal(*blocks->read().runs->find({0, 2}), std::span(addresses).first(2)));
  pool->free(&addresses[2], 1);
  CHECK(free_blocks(*pool) == 3);  // not held
  blocks->exchange({{0, 1}}, {{0, {&addresses[3], 1}}});
  CHECK(blocks->read().runs->find({0, 1})->front() == addresses[3]);
  pool->free(addresses.data(), 1);
  CHECK(free_blocks(*pool) == 4);
  CHECK(blocks->drop({addresses[3]}) == 1);
  CHECK(blocks->blocks() == 1);
}

TEST_CASE("a sequence holds its blocks until it is closed") {
  const auto node = make_attendable_node(4);
  Pool* const pool = &node->pool();
  const Addresses addresses = alloc(*pool, 3);
  Sequence sequence(*node, addresses, std::nullopt, kNoWait);
  CHECK(sequence.tokens() == 3 * kPage);
  CHECK(sequence.addresses() == addresses);
  pool->free(addresses.data(), 3);
  CHECK(free_blocks(*pool) == 1);
  sequence.close();
  CHECK(free_blocks(*pool) == 4);
  sequence.close();
  CHECK(code_of([&] { sequence.append({}, std::nullopt, kNoWait); }) == ErrorCode::kState);
  CHECK(code_of([&] { sequence.set_tokens(1); }) == ErrorCode::kState);
  CHECK(code_of([&] { sequence.snapshot(); }) == ErrorCode::kState);
  pool->audit();
}

TEST_CASE("a sequence that is refused holds nothing, and one that cannot grow is as before") {
  const auto node = make_attendable_node(4);
  Pool* const pool = &node->pool();
  const Addresses addresses = alloc(*pool, 2);
  CHECK(code_of([&] { Sequence(*node, addresses, 2 * kPage + 1, kNoWait); }) == ErrorCode::kArgument);
  Sequence sequence(*node, {addresses.data(), 1}, 3, kNoWait);
  CHECK(code_of([&] { sequence.append({&addresses[1], 1}, 2 * kPage + 1, kNoWait); }) == ErrorCode::kArgument);
  const Addresses stale = alloc(*pool, 1);
  pool->free(stale.data(), 1);
  CHECK(code_of([&] { sequence.append(stale, std::nullopt, kNoWait); }) == ErrorCode::kStaleAddress);
  CHECK(code_of([&] { sequence.set_tokens(kPage + 1); }) == ErrorCode::kArgument);
  CHECK(sequence.tokens() == 3);
  CHECK(sequence.addresses() == Addresses{addresses[0]});
  sequence.close();
  pool->free(addresses.data(), 2);
  CHECK(free_blocks(*pool) == 4);
}

TEST_CASE("attention cannot read raw blocks, or element types without a kernel") {
  CHECK(code_of([&] { SequenceBlocks::check_pool(Pool(small_options(4, 0))); }) == ErrorCode::kUnsupported);
  PoolOptions options = attendable(4);
  options.layout.format.dtype = DType::kInt8;
  CHECK(code_of([&] { SequenceBlocks::check_pool(Pool(options)); }) == ErrorCode::kUnsupported);
}

#ifdef KVPOOL_FAKE_CUDA
TEST_CASE("of a pool on a GPU attention reads the blocks in DRAM and refuses those on the GPU") {
  const FakeCuda cuda;
  PoolOptions options = attendable(2, 2);
  options.device = 0;
  options.pin_dram = true;
  const auto node = std::make_shared<PeerNode>(std::make_shared<Pool>(options), make_ranks);
  Pool* const pool = &node->pool();
  Addresses mixed = alloc(*pool, 1, Medium::kDram);
  fill_values(*pool, mixed, 0, 4.0F);
  Sequence sequence(*node, mixed, std::nullopt, kNoWait);
  mixed.push_back(alloc(*pool, 1, Medium::kHbm)[0]);
  const auto error = error_of([&] { Sequence(*node, mixed, std::nullopt, kNoWait); });
  REQUIRE(error);
  CHECK(error->code() == ErrorCode::kUnsupported);
  CHECK(code_of([&] { sequence.append({&mixed[1], 1}, std::nullopt, kNoWait); }) == ErrorCode::kUnsupported);
  pool->free(&mixed[1], 1);
  CHECK(free_blocks(*pool) == 2);  // the refused ones are not held
  Attend attend(*node, request_of({sequence_of(*node, sequence.addresses())}));
  CHECK(attend.wait(monotonic_ns() + kSecondsNs));
  attend.rethrow_if_failed();
  CHECK(finished(attend).front() == all_of_value(4.0F));
}
#endif

TEST_CASE("a layer's K and V are found in every block of both tiers") {
  const auto pool = make_attendable(3, 3);
  Addresses addresses = alloc(*pool, 2, Medium::kHbm);
  for (const Address address : alloc(*pool, 2, Medium::kDram)) addresses.push_back(address);
  const std::size_t piece = pool->layout().piece_bytes[0];
  const LayerPlaces places(pool->layout(), segments_of(pool->arenas()), 1);
  std::vector<const std::byte*> k(4);
  std::vector<const std::byte*> v(4);
  places.fill(addresses, k.data(), v.data());
  for (std::size_t i = 0; i < 4; ++i) {
    const Segment& segment = pool->arena(medium_of(addresses[i]))->segments()[0];
    const std::byte* const block = segment.base + block_of(addresses[i]) * segment.stride;
    CHECK(k[i] == block + 2 * piece);
    CHECK(v[i] == block + 3 * piece);
  }
}

TEST_CASE("K or V that is cut into several runs of bytes is refused") {
  const PoolOptions options = attendable(2);
  const std::size_t piece = options.layout.piece_bytes[0];
  std::vector<std::byte> memory(2 * 4 * piece);
  // Half of K, the rest of K and V, and the second layer.
  std::vector<Segment> segments = {{memory.data(), piece / 2, piece / 2},
                                   {memory.data() + piece, 3 * piece / 2, 3 * piece / 2},
                                   {memory.data() + 4 * piece, 2 * piece, 2 * piece}};
  MediumMap<std::shared_ptr<Arena>> arenas;
  arenas[Medium::kHbm] = make_adopted_arena(Medium::kHbm, 2, std::move(segments), nullptr);
  CHECK(code_of([&] { LayerPlaces(options.layout, segments_of(arenas), 0); }) == ErrorCode::kUnsupported);
  const LayerPlaces second(options.layout, segments_of(arenas), 1);
  const Address address = make_address(0, Medium::kHbm, 1, 1);
  const std::byte* k = nullptr;
  const std::byte* v = nullptr;
  second.fill({&address, 1}, &k, &v);
  CHECK(k == memory.data() + 6 * piece);
  CHECK(v == memory.data() + 7 * piece);
}

}  // namespace
}  // namespace kvpool::testing
