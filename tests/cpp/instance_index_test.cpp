// The router's tree by example: what each call promises, and what it leaves behind when memory runs out.
#include "kvpool/index/instance_index.h"

#include <doctest/doctest.h>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "failing_alloc.h"
#include "instance_view.h"
#include "kvpool/base/error.h"

namespace {

using kvpool::Error;
using kvpool::InstanceHit;
using kvpool::InstanceHits;
using kvpool::InstanceIndex;
using kvpool::InstanceNode;
using kvpool::kInstanceMax;
using kvpool::Token;
using kvpool::testing::fail_each_allocation;
using kvpool::testing::InstanceView;
using kvpool::testing::Tokens;
using kvpool::testing::view_of;

using Hits = std::vector<InstanceHit>;
constexpr std::uint64_t kSeed = 5;

// Pages of one token.
struct Rig {
  InstanceIndex index{1, kSeed};

  std::size_t insert(const Tokens& tokens, std::uint32_t instance, std::uint64_t now = 0,
                     const std::string& name = "") {
    const std::size_t added = index.insert(name, tokens.data(), tokens.size(), instance, now);
    index.audit();
    return added;
  }
  Hits match(const Tokens& tokens, std::uint64_t now, const std::string& name = "") {
    Hits hits;
    index.match(name, tokens.data(), tokens.size(), now, hits);
    index.audit();
    return hits;
  }
  Hits peek(const Tokens& tokens, const std::string& name = "") const {
    Hits hits{{99, 99}};  // replaced
    index.peek(name, tokens.data(), tokens.size(), hits);
    return hits;
  }
  std::size_t remove(const Tokens& tokens, std::size_t first_page, std::uint32_t instance) {
    const std::size_t removed = index.remove("", tokens.data(), tokens.size(), first_page, instance);
    index.audit();
    return removed;
  }
};

TEST_CASE("an empty tree has no holders") {
  Rig rig;
  CHECK(rig.peek({1, 2}).empty());
  CHECK(rig.match({1, 2}, 1).empty());
  CHECK(rig.remove({1, 2}, 0, 3) == 0);
  CHECK(rig.index.remove_instance(3) == 0);
  CHECK(rig.index.expire(100) == 0);
  CHECK(rig.index.pages(3) == 0);
}

TEST_CASE("a block size of zero and an instance that no address can name are refused") {
  CHECK_THROWS_AS(InstanceIndex(0), Error);
  Rig rig;
  CHECK_THROWS_AS(rig.insert({1}, kInstanceMax + 1), Error);
  CHECK(rig.insert({1}, kInstanceMax) == 1);
  CHECK(rig.index.namespace_count() == 1);
}

TEST_CASE("a match gives each holder's longest prefix, the longest first") {
  Rig rig;
  rig.insert({1, 2, 3, 4}, 7);
  rig.insert({1, 2}, 5);
  rig.insert({1, 2, 3}, 6);
  rig.insert({1, 9}, 4);
  CHECK(rig.peek({1, 2, 3, 4, 5}) == Hits{{7, 4}, {6, 3}, {5, 2}, {4, 1}});
  CHECK(rig.match({1, 2, 3, 4, 5}, 1) == Hits{{7, 4}, {6, 3}, {5, 2}, {4, 1}});
  CHECK(rig.peek({1, 2, 8}) == Hits{{5, 2}, {6, 2}, {7, 2}, {4, 1}});  // by instance where equally long
  CHECK(rig.peek({2}).empty());
  CHECK(rig.peek({1, 2, 3}, "tenant").empty());
}

TEST_CASE("a match can be asked for the holders of equally many pages, and for the pages of one holder") {
  Rig rig;
  rig.insert({1, 2, 3, 4}, 7);
  for (const std::uint32_t instance : {9, 5, 8}) rig.insert({1, 2}, instance);
  const auto find = [&](const Tokens& tokens) {
    InstanceHits hits;
    rig.index.peek("", tokens.data(), tokens.size(), hits);
    return hits;
  };
  const InstanceHits hits = find({1, 2, 3});
  CHECK(hits.levels() == std::vector<InstanceHits::Level>{{3, 0}, {2, 1}});
  CHECK(hits.instances() == std::vector<std::uint32_t>{7, 5, 8, 9});
  CHECK(hits.end_of(0) == 1);
  CHECK(hits.end_of(1) == 4);
  CHECK(hits.level_of(7) == 0);
  CHECK(hits.level_of(8) == 1);
  CHECK(hits.level_of(6) == 2);                                           // it holds nothing
  CHECK(find({1}).levels() == std::vector<InstanceHits::Level>{{1, 0}});  // all four
  CHECK(find({2}).levels().empty());
  rig.index.remove_instance(7);
  CHECK(hits.instances().front() == 7);  // as it was
}

TEST_CASE("an insertion returns how many pages are new for that instance") {
  Rig rig;
  CHECK(rig.insert({1, 2, 3}, 7) == 3);
  CHECK(rig.insert({1, 2, 3}, 7) == 0);
  CHECK(rig.insert({1, 2, 4}, 7) == 1);
  CHECK(rig.insert({1, 2, 4}, 8) == 3);
  CHECK(rig.insert({}, 8) == 0);
  CHECK(rig.index.pages(7) == 4);
  CHECK(rig.index.pages(8) == 3);
  CHECK(rig.index.pages() == 4);
}

TEST_CASE("a peek neither cuts a run nor counts as a use") {
  Rig rig;
  rig.insert({1, 2, 3}, 7, 1);
  rig.peek({1, 2});
  CHECK(rig.index.node_count() == 1);
  CHECK(rig.index.expire(2) == 3);
}

TEST_CASE("a match keeps the matched pages, and no others, from expiring for every holder") {
  Rig rig;
  rig.insert({1, 2, 3}, 7, 1);
  rig.insert({1, 2, 3, 4}, 8, 2);
  rig.match({1, 2, 9}, 5);
  CHECK(rig.index.expire(5) == 3);  // page 3 of both, page 4
  rig.index.audit();
  CHECK(rig.peek({1, 2, 3}) == Hits{{7, 2}, {8, 2}});
}

TEST_CASE("ends of prompts expire before what precedes them, and empty namespaces vanish") {
  Rig rig;
  rig.insert({1, 2, 3}, 7, 1, "tenant");
  rig.insert({1, 2}, 7, 2, "tenant");
  rig.insert({1}, 7, 3, "tenant");
  CHECK(rig.index.expire(2) == 1);
  CHECK(rig.index.expire(3) == 1);
  CHECK(rig.peek({1, 2, 3}, "tenant") == Hits{{7, 1}});
  CHECK(rig.index.namespace_count() == 2);
  CHECK(rig.index.expire(4) == 1);
  CHECK(rig.index.namespace_count() == 1);
  rig.index.audit();
}

TEST_CASE("what was not used for a time counts as not held before it has been dropped") {
  Rig rig;
  rig.insert({1, 2, 3, 4}, 7, 10);
  rig.insert({1, 2}, 7, 20);
  rig.insert({1, 2, 3}, 8, 20);
  const auto since = [&](std::uint64_t time) {
    InstanceHits hits;
    rig.index.peek("", Tokens{1, 2, 3, 4}.data(), 4, hits, time);
    Hits flat;
    for (std::size_t level = 0; level < hits.levels().size(); ++level) {
      for (std::size_t at = hits.levels()[level].begin; at < hits.end_of(level); ++at) {
        flat.push_back({hits.instances()[at], hits.levels()[level].pages});
      }
    }
    return flat;
  };
  CHECK(since(10) == Hits{{7, 4}, {8, 3}});
  CHECK(since(11) == Hits{{8, 3}, {7, 2}});
  CHECK(since(21).empty());
  CHECK(rig.index.pages(7) == 4);
  const Tokens all{1, 2, 3, 4};
  CHECK(rig.index.insert("", all.data(), 4, 7, 30, /*lasting=*/false, /*since=*/15) == 2);  // 3 and 4 are new again
  CHECK(rig.index.pages(7) == 4);
  rig.index.audit();
}

TEST_CASE("a sweep visits so many nodes a call, the longest unused first, and as many as were used meanwhile") {
  Rig rig;
  for (Token page = 0; page < 10; ++page) rig.insert({page, 100 + page}, 7, 1);
  CHECK(rig.index.expire_some(5, 1) == 2);  // what was used before the sweep adds nothing
  for (Token page = 1; page < 4; ++page) rig.insert({page, 100 + page}, 7, 10);
  CHECK(rig.index.expire_some(5, 1) == 8);
  CHECK(rig.index.expire_some(5, 1) == 2);
  CHECK(rig.index.expire_some(5, 1) == 2);
  CHECK(rig.index.expire_some(5, 1) == 0);  // used meanwhile
  rig.index.audit();
}

TEST_CASE("no call of a sweep visits many nodes, however many were used since the last one") {
  Rig rig;
  constexpr Token kPrompts = 1'000;
  for (Token page = 0; page < kPrompts; ++page) rig.insert({kPrompts + page}, 8, 1);
  CHECK(rig.index.expire_some(5, 10) == 10);
  for (Token page = 0; page < kPrompts; ++page) rig.insert({page}, 7, 10);
  std::size_t dropped = 10;
  for (int call = 0; rig.index.pages(8) > 0; ++call) {
    REQUIRE(call < 20);  // of 50 nodes, until all are gone: what one call may not count, the next ones do
    const std::size_t now = rig.index.expire_some(5, 10);
    CHECK(now <= 50);
    dropped += now;
  }
  CHECK(dropped == kPrompts);
  CHECK(rig.index.pages(7) == kPrompts);
  rig.index.audit();
}

TEST_CASE("a sweep ends, however often what it has not reached is used, and reaches what is used all the time") {
  Rig rig;
  for (Token page = 0; page < 50; ++page) rig.insert({1, 100 + page}, 8, 1);  // 8 is not used again
  std::uint64_t now = 10;
  int calls = 0;
  for (; rig.index.pages(8) > 0 && calls < 1000; ++calls) {
    rig.insert({1, 2}, 7, ++now);
    rig.index.expire_some(5, 1);
    rig.index.audit();
  }
  CHECK(calls <= 60);
  CHECK(rig.peek({1, 2}) == Hits{{7, 2}});
}

TEST_CASE("a sweep goes on where nodes have left, have been cut, and have been used") {
  Rig rig;
  rig.insert({1, 2, 3, 4}, 7, 1);
  rig.insert({5, 6, 7, 8}, 7, 2);
  rig.insert({9}, 7, 3);
  CHECK(rig.index.expire_some(2, 3) == 4);  // all of them are looked at
  rig.insert({1, 2, 3, 4}, 7, 4);
  rig.index.expire_some(0, 100);
  CHECK(rig.index.expire_some(4, 1) == 4);        // {5, 6, 7, 8}
  CHECK(rig.remove({9}, 0, 7) == 1);              // the next one
  rig.insert({1, 2}, 8, 5);                       // cuts the one after that
  CHECK(rig.index.expire_some(100, 1'000) == 0);  // the sweep's own time is 4
  CHECK(rig.index.expire_some(100, 1'000) == 6);
  CHECK(rig.index.node_count() == 0);
}

TEST_CASE("lasting pages leave only by removal, and a later use does not make them expire") {
  Rig rig;
  rig.insert({1, 2, 3}, 7, 1);
  rig.index.insert("", Tokens{1, 2}.data(), 2, 7, 2, /*lasting=*/true);
  rig.insert({1, 2, 4}, 7, 3);
  rig.index.audit();
  CHECK(rig.index.expire(1000) == 2);  // pages 3 and 4
  CHECK(rig.peek({1, 2, 3}) == Hits{{7, 2}});
  CHECK(rig.index.expire(kvpool::kLasting) == 0);
  CHECK(rig.remove({1, 2}, 1, 7) == 1);
  CHECK(rig.index.remove_instance(7) == 1);
  CHECK(rig.index.pages() == 0);
}

TEST_CASE("a clock that goes back counts as the latest time seen") {
  Rig rig;
  rig.insert({1, 2}, 7, 10);
  rig.insert({1, 3}, 7, 4);
  CHECK(rig.index.expire(10) == 0);
  CHECK(rig.index.expire(11) == 3);
}

TEST_CASE("an instance loses the end of a prompt and everything below, and others keep it") {
  Rig rig;
  rig.insert({1, 2, 3, 4}, 7);
  rig.insert({1, 2, 3, 5}, 7);
  rig.insert({1, 2, 3, 4}, 8);
  CHECK(rig.remove({1, 2, 3}, 1, 7) == 4);
  CHECK(rig.peek({1, 2, 3, 4}) == Hits{{8, 4}, {7, 1}});
  CHECK(rig.peek({1, 2, 3, 5}) == Hits{{8, 3}, {7, 1}});
  CHECK(rig.index.pages() == 4);  // no instance holds page 5
  CHECK(rig.remove({1, 2, 3, 4}, 1, 7) == 0);
  CHECK(rig.remove({1, 2, 3, 4}, 4, 8) == 0);  // no such page
  CHECK(rig.remove({1, 2, 3, 4, 5}, 4, 8) == 0);
  CHECK(rig.remove({1, 2, 3, 4}, 0, 8) == 4);
  CHECK(rig.index.pages() == 1);
}

TEST_CASE("the only holder's run is shortened where it lies") {
  Rig rig;
  rig.insert({1, 2, 3, 4}, 7);
  rig.insert({1, 2, 3, 4, 5}, 7);
  CHECK(rig.remove({1, 2, 3, 4}, 2, 7) == 3);
  CHECK(rig.index.node_count() == 1);
  CHECK(rig.index.pages() == 2);
  CHECK(rig.peek({1, 2, 3}) == Hits{{7, 2}});
}

TEST_CASE("removing an instance leaves the pages that others hold") {
  Rig rig;
  for (Token token = 0; token < 20; ++token) {
    rig.insert({token, 1, 2}, 7);
    if (token % 2 == 0) rig.insert({token, 1}, 8);
  }
  rig.insert({1}, 7, 0, "tenant");
  CHECK(rig.index.remove_instance(7) == 61);
  rig.index.audit();
  CHECK(rig.index.pages(7) == 0);
  CHECK(rig.index.pages(8) == 20);
  CHECK(rig.index.pages() == 20);
  CHECK(rig.index.namespace_count() == 1);
  CHECK(rig.index.remove_instance(8) == 20);
  CHECK(rig.index.node_count() == 0);
}

TEST_CASE("every instance that an address can name may hold the same prefix") {
  InstanceIndex index(16, kSeed);
  Tokens tokens(16 * 8, 1);
  for (std::uint32_t i = 0; i <= kInstanceMax; ++i) {
    const std::uint32_t instance = (i * 5U) & kInstanceMax;  // in no particular order
    tokens.back() = static_cast<Token>(instance % 4);
    CHECK(index.insert("", tokens.data(), 8, instance, i) == 8);
  }
  index.audit();
  CHECK(index.pages() == 7 + 4);
  CHECK(index.node_count() == 5);
  // Each instance is held twice: 16 bytes each and room to grow.
  CHECK(index.bytes() < 3 * 2 * 16 * (kInstanceMax + 1));
  Hits hits;
  index.match("", tokens.data(), tokens.size(), kInstanceMax + 1, hits);
  REQUIRE(hits.size() == kInstanceMax + 1);
  CHECK(hits[0].pages == 8);
  CHECK(hits[kInstanceMax / 4].pages == 8);
  CHECK(hits[kInstanceMax / 4 + 1].pages == 7);
  CHECK(index.expire(kInstanceMax + 1) == 3 * (kInstanceMax + 1) / 4);  // the ends that the match did not reach
  index.audit();
}

TEST_CASE("an audit finds a holder that lacks an earlier page, and a wrong count") {
  Rig rig;
  rig.insert({1}, 7);
  rig.insert({1, 2}, 7);
  InstanceNode* end = nullptr;
  rig.index.for_each_node([&](const InstanceNode& node) { end = const_cast<InstanceNode*>(&node); });
  REQUIRE(end->tokens[0] == 2);
  end->payload.holders[0].instance = 3;
  CHECK_THROWS_AS(rig.index.audit(), Error);
  end->payload.holders[0] = {7, 1000};
  CHECK_THROWS_AS(rig.index.audit(), Error);
  end->payload.holders[0] = {7, 0};
  CHECK_NOTHROW(rig.index.audit());
}

TEST_CASE("a call that runs out of memory has changed nothing but where runs are cut") {
  const Tokens longer{1, 2, 3, 9};
  const Tokens shorter{1, 2};
  const std::string name = "a tenant whose name is long enough for the heap";
  Hits hits;
  const auto fail_each = [&](auto&& call) {
    int threw = 0;
    for (const Token more : {0, 1, 2, 3, 36, 37, 38, 39}) {  // the table's first growth is at 40 nodes
      threw += fail_each_allocation([&](auto&& fail) {
        Rig rig;
        rig.insert({1, 2, 3, 4}, 7, 1);
        rig.insert({1, 2, 3, 4, 5}, 8, 2);
        for (Token i = 0; i < more; ++i) rig.insert({100 + i}, 7, 2);
        const InstanceView before = view_of(rig.index);
        hits = Hits();  // its memory as well
        if (fail([&] { call(rig.index); })) {
          CHECK(view_of(rig.index) == before);
          CHECK(rig.index.namespace_count() == 1);
        }
        rig.index.audit();
      });
    }
    return threw;
  };
  CHECK(fail_each([&](InstanceIndex& index) { index.insert("", longer.data(), 4, 9, 3); }) > 0);
  CHECK(fail_each([&](InstanceIndex& index) { index.insert("", shorter.data(), 2, 7, 3); }) > 0);
  CHECK(fail_each([&](InstanceIndex& index) { index.insert(name, shorter.data(), 2, 7, 3); }) > 0);
  CHECK(fail_each([&](InstanceIndex& index) { index.match("", shorter.data(), 2, 3, hits); }) > 0);
  CHECK(fail_each([&](InstanceIndex& index) { index.peek("", longer.data(), 4, hits); }) > 0);
  CHECK(fail_each([&](InstanceIndex& index) { index.remove("", shorter.data(), 2, 1, 7); }) > 0);
  CHECK(fail_each([&](InstanceIndex& index) { index.remove_instance(7); }) == 0);
  CHECK(fail_each([&](InstanceIndex& index) { index.expire(2); }) == 0);
}

}  // namespace
