// Attention over sequences whose blocks lie with several peers: the same bits as in one pool, and typed errors when a
// peer recalls blocks, refuses or dies.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kvpool/attention/merge_tree.h"
#include "remote_attend_kit.h"
#include "thrown.h"

namespace kvpool::testing {
namespace {

constexpr std::uint32_t kLeafBlocks = kLeafTokens / kPage;

std::vector<float> random_floats(std::mt19937& random, std::size_t n) {
  std::normal_distribution<float> normal;
  std::vector<float> floats(n);
  for (float& one : floats) one = normal(random);
  return floats;
}

// Random K and V of layer 0 for all of these blocks, the same for the same seed, wherever they lie.
template <class PoolOf>
void fill_randomly(PoolOf pool_of, const Addresses& addresses) {
  std::mt19937 random(3);  // NOLINT(bugprone-random-generator-seed)
  for (const Address address : addresses) {
    for (const std::uint32_t piece : {0U, 1U}) {
      const std::vector<float> values = random_floats(random, kPage * kDim);
      std::ranges::copy(values, piece_of(pool_of(address), address, 0, piece));
    }
  }
}

std::vector<PartialAttention> attended(PeerNode& node, const std::shared_ptr<Sequence>& sequence,
                                       std::uint32_t query_tokens = 1, AttendWhere where = AttendWhere::kAuto) {
  Attend::Request request = request_of({});
  request.where = where;
  request.sequences.push_back({sequence, query_tokens});
  std::mt19937 random(5);  // NOLINT(bugprone-random-generator-seed)
  const std::vector<float> q = random_floats(random, std::size_t{query_tokens} * kQueryHeads * kDim);
  request.q.assign(std::as_bytes(std::span(q)).begin(), std::as_bytes(std::span(q)).end());
  const auto attend = Attend::start(node, std::move(request), soon());
  REQUIRE(attend->wait(soon()));
  attend->rethrow_if_failed();
  attend->merge();
  return attend->take_parts();
}

std::vector<float> output(const PartialAttention& part, std::uint64_t tokens) {
  std::vector<float> out(part.shape().values());
  part.finish(DType::kFloat32, tokens, std::as_writable_bytes(std::span(out)));
  return out;
}

TEST_CASE("the result has the same bits wherever whole leaves of a sequence lie") {
  const std::uint32_t blocks = 3 * kLeafBlocks + 5;
  const std::uint64_t tokens = blocks * kPage - 2;
  const AttendMember one("one", blocks);
  const Addresses all = alloc(one.pool(), blocks);
  fill_randomly([&](Address) -> Pool& { return one.pool(); }, all);
  const auto whole = sequence_of(*one.node, all, tokens);

  const Three three(blocks);
  const Addresses spread = three.a.borrow("b", kLeafBlocks) + three.a.borrow("c", kLeafBlocks) +
                           alloc(three.a.pool(), kLeafBlocks) + three.a.borrow("b", 5);
  fill_randomly([&](Address address) -> Pool& { return three.pool_of(address); }, spread);
  const auto parts = sequence_of(*three.a.node, spread, tokens);
  for (const std::uint32_t query_tokens : {1U, 4U}) {
    const PartialAttention wanted = attended(*one.node, whole, query_tokens).front();
    for (const AttendWhere where : {AttendWhere::kAuto, AttendWhere::kHere, AttendWhere::kThere}) {
      const PartialAttention found = attended(*three.a.node, parts, query_tokens, where).front();
      CHECK(found.exact());
      CHECK(found.kernel() == wanted.kernel());
      CHECK(output(found, tokens) == output(wanted, tokens));
    }
  }
}

TEST_CASE("where a leaf is cut the result is right within rounding and says that it is not exact") {
  const AttendMember one("one");
  const Addresses all = alloc(one.pool(), 12);
  fill_randomly([&](Address) -> Pool& { return one.pool(); }, all);
  const Three three;
  Addresses spread;
  for (int i = 0; i < 4; ++i) {
    spread = spread + three.a.borrow("b", 1) + three.a.borrow("c", 1) + alloc(three.a.pool(), 1);
  }
  fill_randomly([&](Address address) -> Pool& { return three.pool_of(address); }, spread);
  const std::uint64_t tokens = 12 * kPage - 1;
  const PartialAttention found = attended(*three.a.node, sequence_of(*three.a.node, spread, tokens)).front();
  CHECK_FALSE(found.exact());
  const std::vector<float> wanted = output(attended(*one.node, sequence_of(*one.node, all, tokens)).front(), tokens);
  const std::vector<float> out = output(found, tokens);
  for (std::size_t i = 0; i < out.size(); ++i) CHECK(out[i] == doctest::Approx(wanted[i]).epsilon(1e-5));
}

TEST_CASE("a batch asks each peer once, with the tokens of all its sequences there") {
  const Three three;
  const Addresses at_b = three.a.borrow("b", 2);
  const Addresses here = alloc(three.a.pool(), 2);
  fill_values(three.b.pool(), at_b, 0, 2.0F);
  fill_values(three.a.pool(), here, 0, 4.0F);
  const auto mixed = sequence_of(*three.a.node, Addresses{at_b[0], here[0]});
  const auto there = sequence_of(*three.a.node, Addresses{at_b[1]}, 3);
  const auto all_here = sequence_of(*three.a.node, Addresses{here[1]});
  Attend::Request request = request_of({mixed, there, all_here});
  request.where = AttendWhere::kThere;
  const auto attend = Attend::start(*three.a.node, std::move(request), soon());
  REQUIRE(attend->wait(soon()));
  attend->rethrow_if_failed();
  using Peers = std::vector<std::pair<std::string, std::uint64_t>>;
  CHECK(attend->plan().sequences[0].there == Peers{{"b", kPage}});
  CHECK(attend->plan().sequences[1].there == Peers{{"b", 3}});
  CHECK(attend->plan().sequences[2].there.empty());
  const auto results = finished(*attend);
  CHECK(results[0] == all_of_value(3.0F));
  CHECK(results[1] == all_of_value(2.0F));
  CHECK(results[2] == all_of_value(4.0F));
}

TEST_CASE("long queries and answers are spread over several calls") {
  RemoteParts parts({0, 128, DType::kFloat32, std::nullopt, true, Priority::kDecode, {}, {}}, 256);
  const Three three;
  const auto session = three.a.service->reach_owner(three.a.borrow("b", 1), soon());
  const auto view = RemoteView::open(session);
  const std::vector<std::byte> q(std::size_t{16} * 128 * 256 * sizeof(float));  // 2 MiB
  std::uint64_t tokens = 0;
  for (std::size_t i = 0; i < 3; ++i) {
    parts.add(view, i, 16, 1 << 20, q, {0, 15 * kLeafTokens});  // four nodes of 2 MiB
    tokens += 15 * kLeafTokens;
  }
  const std::vector<RemotePart> calls = std::move(parts).take();
  CHECK(calls.size() == 3);
  for (const RemotePart& call : calls) {
    CHECK(write_body(call.asked).size() <= kAttendVerb.request_bytes_max);
    std::size_t answer_bytes = kAttendedHeaderBytes;
    CHECK_NOTHROW(read_attend(write_body(call.asked)));
    for (const AttendBody::Item& item : call.asked.items) {
      answer_bytes += attended_bytes(item.ranges, {16, 128, 256});
      for (const TokenRange& range : item.ranges) tokens -= range.tokens();
    }
    CHECK(answer_bytes <= kAttendVerb.answer_bytes_max);
  }
  CHECK(tokens == 0);
  const std::vector<std::byte> long_q(std::size_t{11} << 20);
  CHECK(code_of([&] { parts.add(view, 0, 16, 0, long_q, {0, 1}); }) == ErrorCode::kArgument);
}

TEST_CASE("a peer that asks for much does not keep another from being served") {
  const AttendMember a("a", 4);
  const AttendMember c("c", 4);
  const AttendMember b("b", 1024, 2, "sock");
  a.meet(b);
  c.meet(b);
  const auto of_a = sequence_of(*a.node, a.borrow("b", 900));
  const auto of_c = sequence_of(*c.node, c.borrow("b", 1));
  std::vector<std::shared_ptr<Attend>> attends;
  for (int i = 0; i < 20; ++i) attends.push_back(Attend::start(*a.node, request_of({of_a}), soon()));
  const auto attend = Attend::start(*c.node, request_of({of_c}), soon());
  REQUIRE(attend->wait(soon()));
  CHECK_NOTHROW(attend->rethrow_if_failed());
  for (const auto& one : attends) CHECK(one->wait(soon()));
}

TEST_CASE("attention never fails or reads old blocks while blocks move between pools") {
  const Three three(16);
  const Addresses here = alloc(three.a.pool(), 4);
  const Addresses there = three.a.borrow("b", 4);
  const Addresses also_there = three.a.borrow("b", 4);
  fill_values(three.a.pool(), here, 0, 1.5F);
  fill_values(three.b.pool(), there, 0, 1.5F);
  fill_values(three.b.pool(), also_there, 0, 1.5F);
  const auto sequence = sequence_of(*three.a.node, here);
  std::atomic<bool> over{false};
  std::atomic<int> attends{0};
  std::thread engine([&] {
    while (!over) {
      const auto attend = Attend::start(*three.a.node, request_of({sequence}), soon());
      const bool ended = attend->wait(soon());
      const auto failure = error_of([&] { attend->rethrow_if_failed(); });
      if (ended && !failure && finished(*attend).front() == all_of_value(1.5F))
        ++attends;
      else
        over = true;
    }
  });
  std::mt19937 random(1);  // NOLINT(bugprone-random-generator-seed)
  Addresses now = here;
  for (int round = 0; round < 300 && !over; ++round) {
    const std::size_t first = random() % 4;
    const std::size_t n = 1 + random() % (4 - first);
    const Addresses& from = std::vector{&here, &there, &also_there}[random() % 3][0];
    const Addresses some(from.begin() + first, from.begin() + first + n);
    if (std::ranges::any_of(some, [&](Address address) { return std::ranges::count(now, address) > 0; })) continue;
    const std::vector<Address> old = sequence->replace(first, some, soon());
    CHECK(old == Addresses(now.begin() + first, now.begin() + first + n));
    std::ranges::copy(some, now.begin() + first);
  }
  CHECK(comes_true([&] { return attends > 0 || over; }));
  CHECK_FALSE(over.exchange(true));
  engine.join();
  CHECK(sequence->addresses() == now);
}

TEST_CASE("a peer that dies costs the tokens that it had and no others") {
  Three three(16);
  const Addresses here = alloc(three.a.pool(), 2);
  const Addresses at_b = three.a.borrow("b", 2);
  const Addresses at_c = three.a.borrow("c", 2);
  fill_values(three.a.pool(), here, 0, 1.0F);
  fill_values(three.b.pool(), at_b, 0, 1.0F);
  const auto first = sequence_of(*three.a.node, Addresses{here[0], at_c[0], at_b[0]});
  const auto second = sequence_of(*three.a.node, Addresses{at_b[1], at_c[1], here[1]}, 2 * kPage - 1);
  three.c.node->close();
  std::shared_ptr<Attend> attend;
  CHECK(comes_true([&] {
    attend = Attend::start(*three.a.node, request_of({first, second}), soon());
    return attend->wait(soon()) && code_of([&] { attend->rethrow_if_failed(); }) == ErrorCode::kPeerLost;
  }));
  const std::vector<Attend::Lost> lost = attend->lost();
  REQUIRE(lost.size() == 2);
  CHECK(lost[0].position == 0);
  CHECK(lost[0].ranges == std::vector<TokenRange>{{kPage, 2 * kPage}});
  CHECK(lost[1].position == 1);
  CHECK(lost[1].ranges == std::vector<TokenRange>{{kPage, 2 * kPage - 1}});
  CHECK(first->lost() == lost[0].ranges);
  const Addresses again = alloc(three.a.pool(), 1);
  fill_values(three.a.pool(), again, 0, 1.0F);
  CHECK(first->replace(1, again, soon()) == Addresses{at_c[0]});
  CHECK(first->lost().empty());
  const auto recovered = Attend::start(*three.a.node, request_of({first}), soon());
  REQUIRE(recovered->wait(soon()));
  recovered->rethrow_if_failed();
  CHECK(finished(*recovered).front() == all_of_value(1.0F));
}

TEST_CASE("a peer that computes for too many calls refuses more, and one that computes for none refuses all") {
  const AttendMember a("a", 4);
  const AttendMember busy("busy", 1024, 1, "sock");  // whose memory is not mapped
  const AttendMember none("none", 4, 0);
  a.meet(busy);
  a.meet(none);
  const auto of_none = sequence_of(*a.node, a.borrow("none", 1));
  Attend::Request there = request_of({of_none});
  there.where = AttendWhere::kThere;
  const auto refused = Attend::start(*a.node, std::move(there), soon());
  REQUIRE(refused->wait(soon()));
  CHECK(code_of([&] { refused->rethrow_if_failed(); }) == ErrorCode::kUnsupported);
  CHECK(refused->lost().empty());

  const auto of_busy = sequence_of(*a.node, a.borrow("busy", 1024));
  std::vector<std::shared_ptr<Attend>> attends;
  for (int i = 0; i < 40; ++i) attends.push_back(Attend::start(*a.node, request_of({of_busy}), soon()));
  int refusals = 0;
  for (const auto& attend : attends) {
    REQUIRE(attend->wait(soon()));
    const auto failure = error_of([&] { attend->rethrow_if_failed(); });
    if (!failure) continue;
    CHECK(failure->code() == ErrorCode::kBusy);
    ++refusals;
  }
  CHECK(refusals > 0);
  CHECK(refusals < 40);
}

TEST_CASE("a peer is not busy with what it has answered") {
  const AttendMember a("a", 4);
  const AttendMember b("b", 1024, 41, "sock");  // whose memory is not mapped
  a.meet(b);
  const auto small = sequence_of(*a.node, a.borrow("b", 1));
  for (int i = 0; i < 41; ++i) {
    const auto attend = Attend::start(*a.node, request_of({small}), soon());
    REQUIRE(attend->wait(soon()));
    attend->rethrow_if_failed();
  }
  const auto large = sequence_of(*a.node, a.borrow("b", 1023));
  std::vector<std::shared_ptr<Attend>> attends;
  for (int i = 0; i < 40; ++i) attends.push_back(Attend::start(*a.node, request_of({large}), soon()));
  for (const auto& attend : attends) {
    REQUIRE(attend->wait(soon()));
    CHECK_NOTHROW(attend->rethrow_if_failed());
  }
}

TEST_CASE("what a peer is too busy for is read from here where its memory is mapped") {
  const AttendMember a("a", 4);
  const AttendMember b("b", 1024, 1);
  a.meet(b);
  const Addresses at_b = a.borrow("b", 1024);
  fill_values(b.pool(), at_b, 0, 2.5F);
  const auto sequence = sequence_of(*a.node, at_b);
  std::vector<std::shared_ptr<Attend>> attends;
  for (int i = 0; i < 40; ++i) attends.push_back(Attend::start(*a.node, request_of({sequence}), soon()));
  for (const auto& attend : attends) {
    REQUIRE(attend->wait(soon()));
    attend->rethrow_if_failed();
    CHECK(finished(*attend).front() == all_of_value(2.5F));
  }
}

TEST_CASE("a peer's memory that is not mapped is not read from here") {
  const Three three(8, "sock");
  const auto sequence = sequence_of(*three.a.node, three.a.borrow("b", 1));
  Attend::Request request = request_of({sequence});
  request.where = AttendWhere::kHere;
  CHECK(code_of([&] { Attend::start(*three.a.node, std::move(request), soon()); }) == ErrorCode::kUnsupported);
  const auto attend = Attend::start(*three.a.node, request_of({sequence}), soon());
  REQUIRE(attend->wait(soon()));
  CHECK(attend->plan().sequences[0].there.size() == 1);
  CHECK_NOTHROW(attend->rethrow_if_failed());
}

TEST_CASE("attention that is cancelled ends at once, and says so only if it was") {
  const Three three(8);
  const auto sequence = sequence_of(*three.a.node, three.a.borrow("b", 2));
  Attend::Request there = request_of({sequence});
  there.where = AttendWhere::kThere;
  for (int round = 0; round < 20; ++round) {
    const auto cancelled = Attend::start(*three.a.node, Attend::Request(there), soon());
    const bool was_first = cancelled->cancel();
    REQUIRE(cancelled->wait(soon()));
    CHECK(error_of([&] { cancelled->rethrow_if_failed(); }).has_value() == was_first);
  }
}

TEST_CASE("two pools that lend to each other do not wait for each other") {
  const AttendMember a("a");
  const AttendMember b("b");
  a.meet(b);
  const auto run = [](const AttendMember& here, const std::string& peer) {
    const auto sequence = sequence_of(*here.node, here.borrow(peer, 16));
    for (int i = 0; i < 100; ++i) {
      const auto attend = Attend::start(*here.node, request_of({sequence}), soon());
      if (!attend->wait(soon()) || error_of([&] { attend->rethrow_if_failed(); })) return false;
    }
    return true;
  };
  bool other = false;
  std::thread thread([&] { other = run(b, "a"); });
  CHECK(run(a, "b"));
  thread.join();
  CHECK(other);
}

}  // namespace
}  // namespace kvpool::testing
