// The prompt index by example: what each call promises.
#include "kvpool/index/prompt_index.h"

#include <doctest/doctest.h>

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "kvpool/base/error.h"

namespace {

using kvpool::Address;
using kvpool::Error;
using kvpool::EvictionPolicy;
using kvpool::IndexErasure;
using kvpool::IndexHit;
using kvpool::IndexInsertion;
using kvpool::IndexObserver;
using kvpool::make_address;
using kvpool::MatchEnd;
using kvpool::Medium;
using kvpool::PromptIndex;
using kvpool::PromptNode;
using kvpool::Token;
using kvpool::ValueClass;

using Tokens = std::vector<Token>;
using Values = std::vector<Address>;

struct Listener final : IndexObserver {
  Values placed_values;
  Values dropped_values;
  std::vector<std::uint64_t> unpinned_stamps;
  void placed(PromptNode& node) noexcept override {
    placed_values.insert(placed_values.end(), node.payload.values.get(), node.payload.values.get() + node.pages);
  }
  void dropped(const Address* values, std::size_t n) noexcept override {
    while (n > 0) dropped_values.push_back(values[--n]);  // the end of a prompt goes first
  }
  void unpinned(PromptNode&, std::uint64_t stamp) noexcept override { unpinned_stamps.push_back(stamp); }
};

// An index with pages of two tokens. A prompt is written as one number a page: 5 stands for the tokens 5, 5.
struct Rig {
  Listener listener;
  PromptIndex index;
  explicit Rig(EvictionPolicy policy = EvictionPolicy::kLru, PromptIndex::Values values = PromptIndex::Values::kOpaque)
      : index(2, policy, values, &listener) {}

  static Tokens tokens_of(std::initializer_list<Token> pages) {
    Tokens tokens;
    for (const Token page : pages) tokens.insert(tokens.end(), 2, page);
    return tokens;
  }

  IndexInsertion insert_pinned(std::initializer_list<Token> pages, Values values, Values* canonical = nullptr,
                               const std::string& name = "") {
    const IndexInsertion insertion =
        index.insert(name, tokens_of(pages).data(), pages.size(), values.data(), values.data());
    if (canonical != nullptr) *canonical = values;
    index.audit();
    return insertion;
  }
  // With values 100, 101, ... by default.
  void insert(std::initializer_list<Token> pages, Values values = {}, const std::string& name = "") {
    if (values.empty()) {
      values.resize(pages.size());
      std::iota(values.begin(), values.end(), Address{100});
    }
    index.unpin(insert_pinned(pages, values, nullptr, name).pin);
  }
  IndexHit match_pinned(const Tokens& tokens, Values* values = nullptr, const std::string& name = "") {
    Values out(tokens.size() / 2);
    const IndexHit hit = index.match(name, tokens.data(), tokens.size(), out.data());
    out.resize(hit.pages);
    if (values != nullptr) *values = out;
    index.audit();
    return hit;
  }
  Values match(std::initializer_list<Token> pages, const std::string& name = "") {
    Values values;
    index.unpin(match_pinned(tokens_of(pages), &values, name).pin);
    return values;
  }
  IndexErasure erase(std::initializer_list<Token> pages, bool descendants = false) {
    const Tokens tokens = tokens_of(pages);
    const IndexErasure erasure = index.erase("", tokens.data(), tokens.size(), descendants);
    index.audit();
    return erasure;
  }
  Values evict(std::size_t n, ValueClass value_class = ValueClass::kOpaque) {
    listener.dropped_values.clear();
    index.evict(value_class, n);
    index.audit();
    return listener.dropped_values;
  }
  MatchEnd end_of(const Tokens& tokens, const std::string& name = "") const {
    MatchEnd end{};
    index.peek(name, tokens.data(), tokens.size(), nullptr, &end);
    return end;
  }
};

TEST_CASE("a block size of zero is refused") {
  CHECK_THROWS_AS(PromptIndex(0, EvictionPolicy::kLru, PromptIndex::Values::kOpaque, nullptr), Error);
}

TEST_CASE("an empty index matches nothing") {
  Rig rig;
  CHECK(rig.match({1, 2}).empty());
  CHECK(rig.match({}).empty());
  CHECK(rig.erase({1}).pages == 0);
  CHECK(rig.evict(5).empty());
  CHECK(rig.index.node_count() == 0);
}

TEST_CASE("a match gives the values of the longest cached prefix in whole pages") {
  Rig rig;
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
  Rig rig;
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
  Rig rig;
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
  Rig rig;
  rig.insert({1, 2, 3, 4}, {11, 12, 13, 14});
  rig.insert({1, 2, 5}, {0, 0, 25});
  CHECK(rig.index.pages(ValueClass::kOpaque) == 5);
  CHECK(rig.index.node_count() == 3);
  CHECK(rig.match({1, 2, 5}) == Values{11, 12, 25});
  CHECK(rig.match({1, 2, 3, 4}) == Values{11, 12, 13, 14});
}

TEST_CASE("an empty insertion changes nothing and makes no namespace") {
  Rig rig;
  const IndexInsertion insertion = rig.insert_pinned({}, {}, nullptr, "tenant");
  CHECK(insertion.pin.node == nullptr);
  CHECK(rig.index.namespace_count() == 1);
  rig.index.unpin(insertion.pin);
  rig.index.undo(insertion);
}

TEST_CASE("namespaces keep equal prompts apart and vanish with their last page") {
  Rig rig;
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
  Rig rig;
  rig.insert({1, 2, 3}, {11, 12, 13});
  rig.insert({7}, {17});
  const Tokens tokens = Rig::tokens_of({1, 2, 9});
  Values out(3);
  const IndexHit hit = rig.index.peek("", tokens.data(), tokens.size(), out.data());
  CHECK(hit.pages == 2);
  CHECK(hit.pin.node == nullptr);
  CHECK(out == Values{11, 12, 0});
  CHECK(rig.index.node_count() == 2);         // nothing was cut
  CHECK(rig.evict(3) == Values{13, 12, 11});  // nothing was used: still the coldest
}

TEST_CASE("a peek says why the match ends") {
  Rig rig;
  rig.insert({1, 2, 3});
  CHECK(rig.end_of({1, 1, 2, 2}) == MatchEnd::kComplete);
  CHECK(rig.end_of({1, 1, 2, 2, 3}) == MatchEnd::kComplete);  // every whole page
  CHECK(rig.end_of({1, 1, 9, 9}) == MatchEnd::kDiverges);
  CHECK(rig.end_of({9, 9}) == MatchEnd::kDiverges);
  CHECK(rig.end_of({1, 1, 2, 2, 3, 3, 4, 4}) == MatchEnd::kNothingBeyond);
  CHECK(rig.end_of({1, 1}, "nobody") == MatchEnd::kNoNamespace);
}

TEST_CASE("LRU evicts the page that was released first, from the ends of prompts inwards") {
  Rig rig;
  rig.insert({1, 2, 3}, {11, 12, 13});
  rig.insert({5, 6}, {15, 16});
  rig.match({1, 2});  // 3 stays cold
  CHECK(rig.evict(1) == Values{13});
  CHECK(rig.evict(3) == Values{16, 15, 12});
  CHECK(rig.evict(1) == Values{11});
}

TEST_CASE("a node loses only as many pages as asked for") {
  Rig rig;
  rig.insert({1, 2, 3, 4}, {11, 12, 13, 14});
  CHECK(rig.evict(3) == Values{14, 13, 12});
  CHECK(rig.match({1, 2}) == Values{11});
  CHECK(rig.index.pages(ValueClass::kOpaque) == 1);
}

TEST_CASE("LFU keeps pages that are matched often") {
  Rig rig(EvictionPolicy::kLfu);
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
  Rig rig(EvictionPolicy::kLfu);
  const IndexInsertion insertion = rig.insert_pinned({1}, {11});
  insertion.pin.node->payload.hits = std::numeric_limits<std::uint32_t>::max() - 1;
  rig.index.unpin(insertion.pin);
  for (int i = 0; i < 3; ++i) rig.match({1});
  CHECK(insertion.pin.node->payload.hits == std::numeric_limits<std::uint32_t>::max());
  rig.insert({2}, {12});
  CHECK(rig.evict(1) == Values{12});
}

TEST_CASE("FIFO evicts by insertion, not by use") {
  Rig rig(EvictionPolicy::kFifo);
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
  Rig rig(EvictionPolicy::kLru, PromptIndex::Values::kAddresses);
  const Address dram = make_address(0, Medium::kDram, 0, 1);
  const Address hbm = make_address(0, Medium::kHbm, 0, 2);
  rig.insert({1, 2}, {dram, hbm});
  CHECK(rig.index.node_count() == 2);
  CHECK(rig.evict(1, ValueClass::kDram) == Values{hbm, dram});
  CHECK(rig.index.node_count() == 0);
}

TEST_CASE("values are classed by medium, and those of other instances form a separate class") {
  Rig rig(EvictionPolicy::kLru, PromptIndex::Values::kAddresses);
  rig.index.set_instance(3);
  rig.insert({1, 2, 3, 4, 5}, {make_address(3, Medium::kHbm, 0, 1), make_address(0, Medium::kHbm, 0, 2),
                               make_address(4, Medium::kHbm, 0, 3), make_address(4, Medium::kDram, 0, 4),
                               make_address(3, Medium::kDram, 0, 5)});
  CHECK(rig.index.pages(ValueClass::kHbm) == 2);
  CHECK(rig.index.pages(ValueClass::kRemote) == 2);
  CHECK(rig.index.pages(ValueClass::kDram) == 1);
  CHECK(rig.index.node_count() == 3);
}

TEST_CASE("erasing a prompt removes the pages that no longer prompt shares") {
  Rig rig;
  rig.insert({1, 2, 3, 4});
  rig.insert({1, 2, 5});
  CHECK(rig.erase({1, 2, 3}).pages == 0);  // a longer prompt goes on
  CHECK(rig.erase({1, 2}).pages == 0);
  CHECK(rig.erase({1, 2, 3, 4}).pages == 2);
  CHECK(rig.match({1, 2, 5}).size() == 3);
  CHECK(rig.erase({1, 2, 5}).pages == 3);  // nobody shares 1, 2 any more
  CHECK(rig.index.node_count() == 0);
}

TEST_CASE("erasing with descendants removes longer prompts as well") {
  Rig rig;
  rig.insert({1, 2, 3, 4});
  rig.insert({1, 2, 3, 5, 6});
  rig.insert({1, 7});
  CHECK(rig.erase({1, 2}, true).pages == 5);
  CHECK(rig.match({1, 7}).size() == 2);
}

TEST_CASE("nothing is erased while one of the pages is pinned") {
  Rig rig;
  rig.insert({1, 2, 3, 4});
  rig.insert({1, 2, 3, 5});
  const IndexHit hit = rig.match_pinned(Rig::tokens_of({1, 2, 3, 5}));
  CHECK(rig.erase({1, 2, 3}, true).pages_pinned == 4);
  CHECK(rig.index.pages(ValueClass::kOpaque) == 5);
  CHECK(rig.erase({1, 2, 3, 4}).pages == 1);
  rig.index.unpin(hit.pin);
  CHECK(rig.erase({1}, true).pages == 4);
}

TEST_CASE("undoing an insertion gives nothing to the owner and leaves earlier pages") {
  Rig rig;
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
  Rig rig;
  const IndexInsertion first = rig.insert_pinned({1, 2, 3}, {11, 12, 13});
  const IndexInsertion second = rig.insert_pinned({1, 5}, {0, 25});  // cuts the first one
  rig.index.undo(second);
  rig.index.audit();
  rig.index.undo(first);
  rig.index.audit();
  CHECK(rig.index.node_count() == 0);
}

TEST_CASE("held pages are neither evicted nor held twice, and can be evicted again after their release") {
  Rig rig;
  rig.insert({1, 2, 3}, {11, 12, 13});
  PromptNode* node = rig.index.hold_coldest(ValueClass::kOpaque, 2);
  REQUIRE(node != nullptr);
  CHECK(node->pages == 2);
  CHECK(node->payload.values[0] == 12);
  CHECK(rig.index.evictable(ValueClass::kOpaque) == 1);
  CHECK(rig.evict(9).empty());  // 11 cannot go before what hangs below it
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
  Rig rig;
  rig.insert({1, 2, 3});
  CHECK(rig.index.hold_coldest(ValueClass::kOpaque, 0) == nullptr);
  CHECK(rig.index.evictable(ValueClass::kOpaque) == 3);
}

TEST_CASE("a node that is matched while it is held stays out of the order until both end") {
  Rig rig;
  rig.insert({1, 2});
  PromptNode* node = rig.index.hold_coldest(ValueClass::kOpaque, 9);
  const IndexHit hit = rig.match_pinned(Rig::tokens_of({1, 2}));
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
  Rig rig(EvictionPolicy::kLru, PromptIndex::Values::kAddresses);
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
  Rig rig;
  const IndexInsertion first = rig.insert_pinned({1, 2, 3}, {11, 12, 13});
  const IndexHit second = rig.match_pinned(Rig::tokens_of({1, 2, 3}));
  first.pin.node->payload.has_limbo = true;
  const IndexHit third = rig.match_pinned(Rig::tokens_of({1, 2}));  // cuts the node: limbo stays below
  rig.index.unpin(third.pin);
  CHECK(rig.listener.unpinned_stamps.empty());
  rig.index.unpin(second.pin);
  rig.index.unpin(first.pin);
  CHECK(rig.listener.unpinned_stamps == std::vector<std::uint64_t>{second.pin.stamp, first.pin.stamp});
  CHECK(first.pin.stamp < second.pin.stamp);
}

TEST_CASE("a reader of events gets whole prefixes") {
  Rig rig;
  rig.insert({1, 2}, {11, 12});
  const auto reader = rig.index.events().subscribe(1000);
  rig.insert({1, 2, 3, 4}, {0, 0, 13, 14}, "");
  rig.evict(1);
  const auto batch = reader->drain();
  REQUIRE(batch.events.size() == 2);
  CHECK(batch.events[0]->kind == kvpool::EventKind::kStored);
  CHECK(batch.events[0]->tokens == Rig::tokens_of({1, 2, 3, 4}));
  CHECK(batch.events[0]->first_page == 2);
  CHECK(batch.events[0]->values == Values{13, 14});
  CHECK(batch.events[1]->kind == kvpool::EventKind::kRemoved);
  CHECK(batch.events[1]->tokens == Rig::tokens_of({1, 2, 3, 4}));
  CHECK(batch.events[1]->first_page == 3);
  CHECK(batch.events[1]->values == Values{14});
  CHECK(batch.events[1]->sequence == batch.events[0]->sequence + 1);
}

TEST_CASE("an audit finds a pin that does not cover its prefix, and values of two classes") {
  Rig rig(EvictionPolicy::kLru, PromptIndex::Values::kAddresses);
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
  --node->payload.pins;
  CHECK_NOTHROW(rig.index.audit());
  node->payload.held = false;
  CHECK_THROWS_AS(rig.index.audit(), Error);
  ++node->payload.pins;
  CHECK_NOTHROW(rig.index.audit());
}

TEST_CASE("the bytes of an index grow with what it holds and fall again") {
  Rig rig;
  const std::size_t empty = rig.index.bytes();
  for (Token i = 0; i < 20000; ++i) {  // not rig.insert(), which audits: that would be quadratic
    const Tokens tokens = Rig::tokens_of({i, i, i});
    Values values(3, static_cast<Address>(i));
    rig.index.unpin(rig.index.insert("", tokens.data(), values.size(), values.data(), values.data()).pin);
  }
  const std::size_t stored = rig.index.bytes();
  CHECK(stored > empty + 20000 * 64);
  rig.evict(60000);
  CHECK(rig.index.bytes() < stored / 2);
}

}  // namespace
