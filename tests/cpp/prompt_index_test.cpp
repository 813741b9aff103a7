// The prompt index by example: matches, insertions, namespaces, erasing, and what its owner and readers of events get.
#include "kvpool/index/prompt_index.h"

#include <doctest/doctest.h>

#include <cstddef>
#include <vector>

#include "kvpool/base/error.h"
#include "prompt_index_rig.h"

namespace {

using kvpool::Address;
using kvpool::Error;
using kvpool::EvictionPolicy;
using kvpool::IndexHit;
using kvpool::IndexInsertion;
using kvpool::make_address;
using kvpool::MatchEnd;
using kvpool::Medium;
using kvpool::PromptIndex;
using kvpool::PromptNode;
using kvpool::Token;
using kvpool::ValueClass;
using kvpool::testing::IndexRig;
using kvpool::testing::Values;

TEST_CASE("a block size of zero is refused") {
  CHECK_THROWS_AS(PromptIndex(0, EvictionPolicy::kLru, PromptIndex::Values::kOpaque, nullptr), Error);
}

TEST_CASE("an empty index matches nothing") {
  IndexRig rig;
  CHECK(rig.match({1, 2}).empty());
  CHECK(rig.match({}).empty());
  CHECK(rig.erase({1}).pages == 0);
  CHECK(rig.evict(5).empty());
  CHECK(rig.index.node_count() == 0);
}

TEST_CASE("a match gives the values of the longest cached prefix in whole pages") {
  IndexRig rig;
  rig.insert({1, 2, 3}, {11, 12, 13});
  CHECK(rig.match({1, 2, 3}) == Values{11, 12, 13});
  CHECK(rig.match({1, 2, 9}) == Values{11, 12});
  CHECK(rig.match({1, 2, 3, 4}) == Values{11, 12, 13});
  CHECK(rig.match({9}).empty());

  Values values;
  const IndexHit hit = rig.match_pinned({1, 1, 2, 2, 3}, &values);
  CHECK(values == Values{11, 12});
  CHECK(hit.partial_tokens == 1);  // half of page 3
  rig.index.unpin(hit.pin);
}

TEST_CASE("a match pins the matched pages, and an insertion the whole prompt") {
  IndexRig rig;
  const IndexInsertion insertion = rig.insert_pinned({1, 2, 3}, {11, 12, 13});
  CHECK(rig.index.evictable(ValueClass::kOpaque) == 0);
  const IndexHit hit = rig.match_pinned({1, 1, 2, 2});
  rig.index.unpin(insertion.pin);
  CHECK(rig.index.evictable(ValueClass::kOpaque) == 1);
  CHECK(rig.evict(9) == Values{13});
  rig.index.unpin(hit.pin);
  CHECK(rig.evict(9).size() == 2);
}

TEST_CASE("a page that is already cached keeps its value, and the caller is told") {
  IndexRig rig;
  rig.insert({1, 2}, {11, 12});
  Values canonical;
  const IndexInsertion insertion = rig.insert_pinned({1, 2, 3}, {21, 22, 23}, &canonical);
  CHECK(canonical == Values{11, 12, 23});
  CHECK(insertion.pages_present == 2);
  rig.index.unpin(insertion.pin);
  CHECK(rig.match({1, 2, 3}) == Values{11, 12, 23});
  CHECK(rig.listener.dropped_values.empty());
}

TEST_CASE("prompts that diverge inside a run share the pages before") {
  IndexRig rig;
  rig.insert({1, 2, 3, 4}, {11, 12, 13, 14});
  rig.insert({1, 2, 5}, {0, 0, 25});
  CHECK(rig.index.pages(ValueClass::kOpaque) == 5);
  CHECK(rig.index.node_count() == 3);
  CHECK(rig.match({1, 2, 5}) == Values{11, 12, 25});
  CHECK(rig.match({1, 2, 3, 4}) == Values{11, 12, 13, 14});
}

TEST_CASE("an empty insertion changes nothing and makes no namespace") {
  IndexRig rig;
  const IndexInsertion insertion = rig.insert_pinned({}, {}, nullptr, "tenant");
  CHECK(insertion.pin.node == nullptr);
  CHECK(rig.index.namespace_count() == 1);
  rig.index.unpin(insertion.pin);
  rig.index.undo(insertion);
}

TEST_CASE("namespaces keep equal prompts apart and vanish with their last page") {
  IndexRig rig;
  rig.insert({1}, {11});
  rig.insert({1, 2}, {21, 22}, "tenant");
  CHECK(rig.match({1}) == Values{11});
  CHECK(rig.match({1, 2}, "tenant") == Values{21, 22});
  CHECK(rig.match({1}, "nobody").empty());
  CHECK(rig.index.namespace_count() == 2);
  rig.evict(9);
  CHECK(rig.index.namespace_count() == 1);
}

TEST_CASE("a peek returns what a match would, and leaves no trace") {
  IndexRig rig;
  rig.insert({1, 2, 3}, {11, 12, 13});
  rig.insert({7}, {17});
  const std::vector<Token> tokens = IndexRig::tokens_of({1, 2, 9});
  Values out(3);
  const IndexHit hit = rig.index.peek("", tokens.data(), tokens.size(), out.data());
  CHECK(hit.pages == 2);
  CHECK(hit.pin.node == nullptr);
  CHECK(out == Values{11, 12, 0});
  CHECK(rig.index.node_count() == 2);         // nothing was cut
  CHECK(rig.evict(3) == Values{13, 12, 11});  // nothing was used: still the coldest
}

TEST_CASE("a peek says why the match ends") {
  IndexRig rig;
  rig.insert({1, 2, 3});
  CHECK(rig.end_of({1, 1, 2, 2}) == MatchEnd::kComplete);
  CHECK(rig.end_of({1, 1, 2, 2, 3}) == MatchEnd::kComplete);  // every whole page
  CHECK(rig.end_of({1, 1, 9, 9}) == MatchEnd::kDiverges);
  CHECK(rig.end_of({9, 9}) == MatchEnd::kDiverges);
  CHECK(rig.end_of({1, 1, 2, 2, 3, 3, 4, 4}) == MatchEnd::kNothingBeyond);
  CHECK(rig.end_of({1, 1}, "nobody") == MatchEnd::kNoNamespace);
}

TEST_CASE("erasing a prompt removes the pages that no longer prompt shares") {
  IndexRig rig;
  rig.insert({1, 2, 3, 4});
  rig.insert({1, 2, 5});
  CHECK(rig.erase({1, 2, 3}).pages == 0);  // a longer prompt goes on
  CHECK(rig.erase({1, 2}).pages == 0);
  CHECK(rig.erase({1, 2, 3, 4}).pages == 2);
  CHECK(rig.match({1, 2, 5}).size() == 3);
  CHECK(rig.erase({1, 2, 5}).pages == 3);  // no prompt shares 1, 2 any more
  CHECK(rig.index.node_count() == 0);
}

TEST_CASE("erasing with descendants removes longer prompts as well") {
  IndexRig rig;
  rig.insert({1, 2, 3, 4});
  rig.insert({1, 2, 3, 5, 6});
  rig.insert({1, 7});
  CHECK(rig.erase({1, 2}, true).pages == 5);
  CHECK(rig.match({1, 7}).size() == 2);
}

TEST_CASE("nothing is erased while one of the pages is pinned") {
  IndexRig rig;
  rig.insert({1, 2, 3, 4});
  rig.insert({1, 2, 3, 5});
  const IndexHit hit = rig.match_pinned(IndexRig::tokens_of({1, 2, 3, 5}));
  CHECK(rig.erase({1, 2, 3}, true).pages_pinned == 4);
  CHECK(rig.index.pages(ValueClass::kOpaque) == 5);
  CHECK(rig.erase({1, 2, 3, 4}).pages == 1);
  rig.index.unpin(hit.pin);
  CHECK(rig.erase({1}, true).pages == 4);
}

TEST_CASE("undoing an insertion gives nothing to the owner and leaves earlier pages") {
  IndexRig rig;
  rig.insert({1, 2}, {11, 12});
  const IndexInsertion insertion = rig.insert_pinned({1, 3, 4}, {0, 23, 24});
  rig.index.undo(insertion);
  rig.index.audit();
  CHECK(rig.listener.dropped_values.empty());
  CHECK(rig.match({1, 3}) == Values{11});
  CHECK(rig.match({1, 2}) == Values{11, 12});
  CHECK(rig.index.evictable(ValueClass::kOpaque) == 2);

  rig.index.undo(rig.insert_pinned({1}, {31}, nullptr, "tenant"));
  CHECK(rig.index.namespace_count() == 1);
}

TEST_CASE("a batch of insertions is undone from its end") {
  IndexRig rig;
  const IndexInsertion first = rig.insert_pinned({1, 2, 3}, {11, 12, 13});
  const IndexInsertion second = rig.insert_pinned({1, 5}, {0, 25});  // cuts the first one
  rig.index.undo(second);
  rig.index.audit();
  rig.index.undo(first);
  rig.index.audit();
  CHECK(rig.index.node_count() == 0);
}

TEST_CASE("a reader of events gets whole prefixes") {
  IndexRig rig;
  rig.insert({1, 2}, {11, 12});
  const auto reader = rig.index.events().subscribe(1000);
  rig.insert({1, 2, 3, 4}, {0, 0, 13, 14}, "");
  rig.evict(1);
  const auto batch = reader->drain();
  REQUIRE(batch.events.size() == 2);
  CHECK(batch.events[0]->kind == kvpool::EventKind::kStored);
  CHECK(batch.events[0]->tokens == IndexRig::tokens_of({1, 2, 3, 4}));
  CHECK(batch.events[0]->first_page == 2);
  CHECK(batch.events[0]->values == Values{13, 14});
  CHECK(batch.events[1]->kind == kvpool::EventKind::kRemoved);
  CHECK(batch.events[1]->tokens == IndexRig::tokens_of({1, 2, 3, 4}));
  CHECK(batch.events[1]->first_page == 3);
  CHECK(batch.events[1]->values == Values{14});
  CHECK(batch.events[1]->sequence == batch.events[0]->sequence + 1);
}

TEST_CASE("an audit finds a pin that does not cover its prefix, and values of two classes") {
  IndexRig rig(EvictionPolicy::kLru, PromptIndex::Values::kAddresses);
  const IndexInsertion insertion =
      rig.insert_pinned({1, 2, 3}, {make_address(0, Medium::kHbm, 0, 1), make_address(0, Medium::kDram, 0, 2),
                                    make_address(0, Medium::kDram, 0, 3)});
  PromptNode* node = insertion.pin.node;
  ++node->payload.pins;
  CHECK_THROWS_AS(rig.index.audit(), Error);
  --node->payload.pins;
  node->payload.values[0] = make_address(0, Medium::kHbm, 0, 9);
  CHECK_THROWS_AS(rig.index.audit(), Error);
  node->payload.values[0] = make_address(0, Medium::kDram, 0, 2);
  node->payload.held = true;
  CHECK_NOTHROW(rig.index.audit());
  --node->payload.pins;  // held and not pinned, and not counted as such
  CHECK_THROWS_AS(rig.index.audit(), Error);
  node->payload.held = false;
  CHECK_THROWS_AS(rig.index.audit(), Error);
  ++node->payload.pins;
  CHECK_NOTHROW(rig.index.audit());
}

TEST_CASE("the bytes of an index grow with what it holds and fall again") {
  IndexRig rig;
  const std::size_t empty = rig.index.bytes();
  for (Token i = 0; i < 20000; ++i) {  // not rig.insert(), which audits: that would be quadratic
    const std::vector<Token> tokens = IndexRig::tokens_of({i, i, i});
    Values values(3, static_cast<Address>(i));
    rig.index.unpin(rig.index.insert("", tokens.data(), values.size(), values.data(), values.data()).pin);
  }
  const std::size_t stored = rig.index.bytes();
  CHECK(stored > empty + 20000 * 64);
  rig.evict(60000);
  CHECK(rig.index.bytes() < stored / 2);
}

}  // namespace
