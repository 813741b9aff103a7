// The prompt index by example: which pages go first, and pages that are held, moved or in limbo.
#include <doctest/doctest.h>

#include <cstdint>
#include <limits>
#include <vector>

#include "kvpool/index/prompt_index.h"
#include "prompt_index_rig.h"

namespace {

using kvpool::Address;
using kvpool::EvictionPolicy;
using kvpool::IndexHit;
using kvpool::IndexInsertion;
using kvpool::make_address;
using kvpool::Medium;
using kvpool::PromptIndex;
using kvpool::PromptNode;
using kvpool::ValueClass;
using kvpool::testing::IndexRig;
using kvpool::testing::Values;

TEST_CASE("LRU evicts the page that was released first, from the ends of prompts inwards") {
  IndexRig rig;
  rig.insert({1, 2, 3}, {11, 12, 13});
  rig.insert({5, 6}, {15, 16});
  rig.match({1, 2});  // 3 stays cold
  CHECK(rig.evict(1) == Values{13});
  CHECK(rig.evict(3) == Values{16, 15, 12});
  CHECK(rig.evict(1) == Values{11});
}

TEST_CASE("a node loses only as many pages as asked for") {
  IndexRig rig;
  rig.insert({1, 2, 3, 4}, {11, 12, 13, 14});
  CHECK(rig.evict(3) == Values{14, 13, 12});
  CHECK(rig.match({1, 2}) == Values{11});
  CHECK(rig.index.pages(ValueClass::kOpaque) == 1);
}

TEST_CASE("LFU keeps pages that are matched often") {
  IndexRig rig(EvictionPolicy::kLfu);
  rig.insert({1}, {11});
  rig.insert({2}, {12});
  rig.insert({3}, {13});
  for (int i = 0; i < 3; ++i) rig.match({1});
  for (int i = 0; i < 2; ++i) rig.match({2});
  CHECK(rig.evict(1) == Values{13});
  CHECK(rig.evict(1) == Values{12});
  CHECK(rig.evict(1) == Values{11});
}

TEST_CASE("LFU's match count saturates") {
  IndexRig rig(EvictionPolicy::kLfu);
  const IndexInsertion insertion = rig.insert_pinned({1}, {11});
  insertion.pin.node->payload.hits = std::numeric_limits<std::uint32_t>::max() - 1;
  rig.index.unpin(insertion.pin);
  for (int i = 0; i < 3; ++i) rig.match({1});
  CHECK(insertion.pin.node->payload.hits == std::numeric_limits<std::uint32_t>::max());
  rig.insert({2}, {12});
  CHECK(rig.evict(1) == Values{12});
}

TEST_CASE("FIFO evicts by insertion, not by use") {
  IndexRig rig(EvictionPolicy::kFifo);
  rig.insert({1}, {11});
  rig.insert({2}, {12});
  rig.insert({3}, {13});
  rig.match({1});
  rig.insert({2}, {22});
  CHECK(rig.evict(1) == Values{11});
  CHECK(rig.evict(1) == Values{13});
  CHECK(rig.evict(1) == Values{12});
}

TEST_CASE("an evicted page takes descendants of another class with it, which are not counted") {
  IndexRig rig(EvictionPolicy::kLru, PromptIndex::Values::kAddresses);
  const Address dram = make_address(0, Medium::kDram, 0, 1);
  const Address hbm = make_address(0, Medium::kHbm, 0, 2);
  rig.insert({1, 2}, {dram, hbm});
  CHECK(rig.index.node_count() == 2);
  CHECK(rig.evict(1, ValueClass::kDram) == Values{hbm, dram});
  CHECK(rig.index.node_count() == 0);
}

TEST_CASE("values are classed by medium, and those of other instances form a separate class") {
  IndexRig rig(EvictionPolicy::kLru, PromptIndex::Values::kAddresses);
  rig.index.set_instance(3);
  rig.insert({1, 2, 3, 4, 5}, {make_address(3, Medium::kHbm, 0, 1), make_address(0, Medium::kHbm, 0, 2),
                               make_address(4, Medium::kHbm, 0, 3), make_address(4, Medium::kDram, 0, 4),
                               make_address(3, Medium::kDram, 0, 5)});
  CHECK(rig.index.pages(ValueClass::kHbm) == 2);
  CHECK(rig.index.pages(ValueClass::kRemote) == 2);
  CHECK(rig.index.pages(ValueClass::kDram) == 1);
  CHECK(rig.index.node_count() == 3);
}

TEST_CASE("held pages are neither evicted nor held twice, and can be evicted again after their release") {
  IndexRig rig;
  rig.insert({1, 2, 3}, {11, 12, 13});
  PromptNode* node = rig.index.hold_coldest(ValueClass::kOpaque, 2);
  REQUIRE(node != nullptr);
  CHECK(node->pages == 2);
  CHECK(node->payload.values[0] == 12);
  CHECK(rig.index.evictable(ValueClass::kOpaque) == 1);
  CHECK(rig.evict(9).empty());  // 11 cannot be evicted before its descendants
  PromptNode* above = rig.index.hold_coldest(ValueClass::kOpaque, 9);
  REQUIRE(above != nullptr);
  CHECK(above->pages == 1);
  CHECK(rig.index.hold_coldest(ValueClass::kOpaque, 9) == nullptr);
  rig.index.release_hold(node);
  rig.index.release_hold(node);  // once is enough
  rig.index.release_hold(above);
  rig.index.audit();
  CHECK(rig.evict(9).size() == 3);
}

TEST_CASE("holding no pages holds nothing") {
  IndexRig rig;
  rig.insert({1, 2, 3});
  CHECK(rig.index.hold_coldest(ValueClass::kOpaque, 0) == nullptr);
  CHECK(rig.index.evictable(ValueClass::kOpaque) == 3);
}

TEST_CASE("a node that is matched while it is held stays out of the order until both end") {
  IndexRig rig;
  rig.insert({1, 2});
  PromptNode* node = rig.index.hold_coldest(ValueClass::kOpaque, 9);
  const IndexHit hit = rig.match_pinned(IndexRig::tokens_of({1, 2}));
  rig.index.release_hold(node);
  rig.index.audit();
  CHECK(rig.index.evictable(ValueClass::kOpaque) == 0);
  rig.index.unpin(hit.pin);
  CHECK(rig.index.evictable(ValueClass::kOpaque) == 2);

  node = rig.index.hold_coldest(ValueClass::kOpaque, 9);
  rig.match({1, 2});
  rig.index.audit();
  CHECK(rig.index.evictable(ValueClass::kOpaque) == 0);
  rig.index.release_hold(node);
  CHECK(rig.index.evictable(ValueClass::kOpaque) == 2);
}

TEST_CASE("pages in the middle of a run can be split into a separate node and given other values") {
  IndexRig rig(EvictionPolicy::kLru, PromptIndex::Values::kAddresses);
  const auto dram = [](std::uint32_t block) { return make_address(0, Medium::kDram, 0, block); };
  const auto hbm = [](std::uint32_t block) { return make_address(0, Medium::kHbm, 0, block); };
  const IndexInsertion insertion = rig.insert_pinned({1, 2, 3, 4}, {dram(1), dram(2), dram(3), dram(4)});
  rig.listener.placed_values.clear();
  PromptNode* node = rig.index.isolate(insertion.pin.node, 1, 2);
  CHECK(node->pages == 2);
  CHECK(rig.listener.placed_values == Values{dram(1), dram(2), dram(3)});  // upper halves are new nodes
  const Values moved{hbm(2), hbm(3)};
  rig.index.redirect(node, moved.data());
  rig.index.audit();
  CHECK(rig.index.pages(ValueClass::kHbm) == 2);
  CHECK(rig.index.pages(ValueClass::kDram) == 2);
  rig.index.unpin(insertion.pin);
  CHECK(rig.match({1, 2, 3, 4}) == Values{dram(1), hbm(2), hbm(3), dram(4)});
  CHECK(rig.index.isolate(node, 0, 2) == node);  // it is one already
}

TEST_CASE("the owner is told of each pin that leaves a node in limbo, and when it was taken") {
  IndexRig rig;
  const IndexInsertion first = rig.insert_pinned({1, 2, 3}, {11, 12, 13});
  const IndexHit second = rig.match_pinned(IndexRig::tokens_of({1, 2, 3}));
  first.pin.node->payload.has_limbo = true;
  const IndexHit third = rig.match_pinned(IndexRig::tokens_of({1, 2}));  // cuts the node: limbo stays below
  rig.index.unpin(third.pin);
  CHECK(rig.listener.unpinned_stamps.empty());
  rig.index.unpin(second.pin);
  rig.index.unpin(first.pin);
  CHECK(rig.listener.unpinned_stamps == std::vector<std::uint64_t>{second.pin.stamp, first.pin.stamp});
  CHECK(first.pin.stamp < second.pin.stamp);
}

}  // namespace
