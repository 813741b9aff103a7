// Attention over a pool's blocks on a (fake) GPU: alone, mixed with DRAM, behind the engine's work, and for peers.
#include <doctest/doctest.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "gpu_pool_attend_kit.h"
#include "joined_service.h"
#include "thrown.h"

#ifdef KVPOOL_FAKE_CUDA

namespace kvpool::testing {
namespace {

constexpr KernelId kGpuKernel{AttentionIsa::kSm90, 1};

Addresses in_turns(const Addresses& hbm, const Addresses& dram, std::size_t each) {
  Addresses mixed;
  for (std::size_t i = 0; i < hbm.size(); i += each) {
    mixed.insert(mixed.end(), hbm.begin() + static_cast<std::ptrdiff_t>(i),
                 hbm.begin() + static_cast<std::ptrdiff_t>(std::min(i + each, hbm.size())));
    mixed.insert(mixed.end(), dram.begin() + static_cast<std::ptrdiff_t>(std::min(i, dram.size())),
                 dram.begin() + static_cast<std::ptrdiff_t>(std::min(i + each, dram.size())));
  }
  return mixed;
}

TEST_CASE("attention reads the blocks of a pool's GPU there") {
  const GpuNodes nodes;
  {
    const auto node = nodes.make(400);
    const Addresses blocks = alloc(node->pool(), 300);
    fill_sequence(nodes.fake(), node->pool(), blocks);
    const auto attend = Attend::start(*node, two_heads_over(sequence_over(*node, blocks)), in_seconds(20));
    CHECK(attend->plan().gpu_kernel == kGpuKernel);
    CHECK(attend->plan().sequences[0].gpu_tokens == 1200);
    CHECK(attend->plan().sequences[0].here.nodes == 0);
    const PartialAttention part = part_of(*attend);
    CHECK(part.kernel() == kGpuKernel);
    CHECK(part.exact());
    check_close(output_of(part, 1200), expected_output(nodes.fake(), 300));
    CHECK(nodes.fake().count("pageable") == 0);
    node->close();
  }
  CHECK(nodes.fake().left() == "");
}

TEST_CASE("attention reads a sequence in HBM and DRAM with the GPU and the CPU") {
  const GpuNodes nodes;
  for (const std::size_t each : {1, 3, 50, 256}) {  // blocks of one medium behind each other
    CAPTURE(each);
    const auto node = nodes.make(300, 300);
    Pool& pool = node->pool();
    const Addresses blocks = in_turns(alloc(pool, 290), alloc(pool, 280, Medium::kDram), each);
    fill_sequence(nodes.fake(), pool, blocks);
    const auto attend = Attend::start(*node, two_heads_over(sequence_over(*node, blocks)), in_seconds(20));
    CHECK(attend->plan().sequences[0].gpu_tokens == 290 * kPage);
    CHECK(attend->plan().sequences[0].here.nodes > 0);
    const PartialAttention part = part_of(*attend);
    check_close(output_of(part, 570 * kPage), expected_output(nodes.fake(), 570));
    // Two leaves of 1,024 tokens, and the beginning of a third.
    REQUIRE(part.nodes().size() == 2);
    CHECK(part.nodes()[0].range.end == 2048);
    CHECK(part.nodes()[1].range.end == 2280);
    CHECK_FALSE(part.exact());  // two kernels computed it
    CHECK(part.kernel() == std::nullopt);
  }
}

TEST_CASE("batches of sequences in any mixture of HBM and DRAM give what ordinary memory gives") {
  const GpuNodes nodes;
  Dice dice(31);
  for (int turn = 0; turn < 9; ++turn) {
    CAPTURE(turn);
    const auto node = nodes.make(700, 700);
    const auto plain = GpuNodes::make_on_cpu(1400);
    Attend::Request mixed;
    Attend::Request ordinary;
    std::size_t query_tokens = 0;
    for (int i = 0; i < 3; ++i) {
      const std::uint32_t blocks = 1 + dice.below(turn < 2 ? 450 : 60);  // over several leaves in two of the turns
      const std::uint32_t hbm = dice.below(blocks + 1);
      Addresses here = alloc(node->pool(), hbm);
      const Addresses dram = alloc(node->pool(), blocks - hbm, Medium::kDram);
      here.insert(here.end(), dram.begin(), dram.end());
      if (dice.one_in(2)) std::ranges::reverse(here);
      for (std::uint32_t swaps = dice.below(20); swaps > 0; --swaps) {
        std::swap(here[dice.below(blocks)], here[dice.below(blocks)]);
      }
      const Addresses there = alloc(plain->pool(), blocks);
      fill_sequence(nodes.fake(), node->pool(), here);
      fill_sequence(nodes.fake(), plain->pool(), there);
      const std::uint64_t tokens = std::uint64_t{blocks} * kPage - dice.below(kPage);
      const auto queries = static_cast<std::uint32_t>(std::min<std::uint64_t>(tokens, 1 + dice.below(9)));
      query_tokens += queries;
      mixed.sequences.push_back({std::make_shared<Sequence>(*node, here, tokens, in_seconds(20)), queries});
      ordinary.sequences.push_back({std::make_shared<Sequence>(*plain, there, tokens, in_seconds(20)), queries});
    }
    for (Attend::Request* const request : {&mixed, &ordinary}) {
      request->query_heads = 2;
      request->query_dtype = DType::kFloat32;
      request->causal = turn % 3 != 0;
      std::vector<float> q(query_tokens * 2 * kGpuDim);
      for (std::size_t i = 0; i < q.size(); ++i) q[i] = static_cast<float>(i % 11) / 11.0F - 0.4F;
      request->q.resize(q.size() * sizeof(float));
      std::memcpy(request->q.data(), q.data(), request->q.size());
    }
    const auto got = Attend::start(*node, std::move(mixed), in_seconds(20));
    const auto expected = Attend::start(*plain, std::move(ordinary), in_seconds(20));
    check_close(outputs_of(*got), outputs_of(*expected));
  }
}

TEST_CASE("a pool on a GPU attends to what lies in DRAM alone without the GPU") {
  const GpuNodes nodes;
  const auto node = nodes.make(4, 20);
  const Addresses blocks = alloc(node->pool(), 20, Medium::kDram);
  fill_sequence(nodes.fake(), node->pool(), blocks);
  const EngineStream engine(nodes.fake());
  const Gate gate(engine);  // nothing waits for the GPU
  const auto attend = Attend::start(*node, two_heads_over(sequence_over(*node, blocks)), in_seconds(20));
  const std::size_t launches = nodes.fake().count("cuLaunchKernel");
  check_close(output_of(part_of(*attend), 80), expected_output(nodes.fake(), 20));
  CHECK(nodes.fake().count("cuLaunchKernel") == launches);
}

TEST_CASE("the GPU's part begins when the work of the engine's stream has ended") {
  const GpuNodes nodes;
  const auto node = nodes.make(20, 10);
  Pool& pool = node->pool();
  const Addresses hbm = alloc(pool, 20);
  const Addresses blocks = in_turns(hbm, alloc(pool, 10, Medium::kDram), 5);
  fill_sequence(nodes.fake(), pool, blocks);
  std::memset(piece_of(nodes.fake(), pool, blocks.back(), 1), 0, kPieceFloats * sizeof(float));
  REQUIRE(medium_of(blocks.back()) == Medium::kHbm);
  const EngineStream engine(nodes.fake());
  for (const bool named : {true, false}) {
    CAPTURE(named);
    Gate gate(engine);
    engine.run([&] { fill_block_of_sequence(nodes.fake(), pool, blocks.back(), blocks.size() - 1); });
    Attend::Request request = two_heads_over(sequence_over(*node, blocks));
    if (named) request.stream = engine.handle();
    const auto attend = Attend::start(*node, std::move(request), in_seconds(20));
    dawdle();
    CHECK_FALSE(attend->done());
    gate.open();
    check_close(output_of(part_of(*attend), 120), expected_output(nodes.fake(), 30));
    std::memset(piece_of(nodes.fake(), pool, blocks.back(), 1), 0, kPieceFloats * sizeof(float));
  }
}

TEST_CASE("attention behind a stream that stands ends at its deadline, and the pool stays whole") {
  const GpuNodes nodes;
  const auto node = nodes.make(20);
  const Addresses blocks = alloc(node->pool(), 20);
  fill_sequence(nodes.fake(), node->pool(), blocks);
  const EngineStream engine(nodes.fake());
  const auto sequence = sequence_over(*node, blocks);
  {
    const Gate gate(engine);
    Attend::Request request = two_heads_over(sequence);
    request.stream = engine.handle();
    const auto late = Attend::start(*node, std::move(request), in_seconds(0.02));
    CHECK(late->wait(in_seconds(20)));
    CHECK(code_of([&] { late->rethrow_if_failed(); }) == ErrorCode::kDeadline);
  }
  const auto attend = Attend::start(*node, two_heads_over(sequence), in_seconds(20));
  check_close(output_of(part_of(*attend), 80), expected_output(nodes.fake(), 20));
}

TEST_CASE("wait() behind a stream that stands returns at its own time") {
  const GpuNodes nodes;
  const auto node = nodes.make(20);
  const Addresses blocks = alloc(node->pool(), 20);
  fill_sequence(nodes.fake(), node->pool(), blocks);
  const EngineStream engine(nodes.fake());
  Gate gate(engine);
  Attend::Request request = two_heads_over(sequence_over(*node, blocks));
  request.stream = engine.handle();
  const auto attend = Attend::start(*node, std::move(request), in_seconds(60));
  const std::int64_t begin_ns = monotonic_ns();
  CHECK_FALSE(attend->wait(in_seconds(0.02)));
  CHECK(monotonic_ns() - begin_ns < 20'000'000'000);
  gate.open();
  check_close(output_of(part_of(*attend), 80), expected_output(nodes.fake(), 20));
}

TEST_CASE("a pool that closes does not wait for a stream that its attention follows") {
  const GpuNodes nodes;
  const EngineStream engine(nodes.fake());
  {
    const auto node = nodes.make(20);
    const Addresses blocks = alloc(node->pool(), 20);
    Gate gate(engine);
    Attend::Request request = two_heads_over(sequence_over(*node, blocks));
    request.stream = engine.handle();
    const auto attend = Attend::start(*node, std::move(request), in_seconds(60));
    dawdle();
    const std::int64_t begin = monotonic_ns();
    std::thread closer([&] { node->close(); });
    CHECK(attend->wait(in_seconds(20)));
    CHECK(monotonic_ns() - begin < 10'000'000'000);
    CHECK(code_of([&] { attend->rethrow_if_failed(); }) == ErrorCode::kClosed);
    gate.open();  // the end of the memory waits for the GPU
    closer.join();
  }
}

TEST_CASE("what attention on a GPU cannot do is refused before anything is computed") {
  const GpuNodes nodes;
  const auto without = nodes.make(8, 8, /*with_kernels=*/false);
  const Addresses blocks = alloc(without->pool(), 2);
  CHECK(code_of([&] { sequence_over(*without, blocks); }) == ErrorCode::kUnsupported);
  sequence_over(*without, alloc(without->pool(), 2, Medium::kDram));

  const auto node = nodes.make(8);
  const auto sequence = sequence_over(*node, alloc(node->pool(), 2));
  Attend::Request other_type = two_heads_over(sequence);
  other_type.query_dtype = DType::kFloat16;
  other_type.q.resize(other_type.q.size() / 2);
  CHECK(code_of([&] { Attend::start(*node, std::move(other_type), in_seconds(1)); }) == ErrorCode::kUnsupported);
  Attend::Request other_gpu = two_heads_over(sequence);
  const EngineStream elsewhere(nodes.fake(), 1);
  other_gpu.stream = elsewhere.handle();
  CHECK(code_of([&] { Attend::start(*node, std::move(other_gpu), in_seconds(1)); }) == ErrorCode::kArgument);

  const auto on_cpu = GpuNodes::make_on_cpu(4);
  Attend::Request stray = two_heads_over(sequence_over(*on_cpu, alloc(on_cpu->pool(), 1)));
  stray.stream = CuStream{};
  CHECK(code_of([&] { Attend::start(*on_cpu, std::move(stray), in_seconds(1)); }) == ErrorCode::kArgument);
}

TEST_CASE("a GPU that is lost during attention fails the pool") {
  const GpuNodes nodes;
  const auto node = nodes.make(20);
  const auto sequence = sequence_over(*node, alloc(node->pool(), 20));
  nodes.fake().lose(0, 700);
  const auto attend = Attend::start(*node, two_heads_over(sequence), in_seconds(20));
  CHECK(attend->wait(in_seconds(20)));
  CHECK(code_of([&] { attend->rethrow_if_failed(); }) == ErrorCode::kDeviceLost);
  CHECK(node->pool().failure()->code() == ErrorCode::kDeviceLost);
}

struct Peers {
  explicit Peers(const GpuNodes& nodes, std::uint32_t viewed_max = 1000)
      : borrower(GpuNodes::make_on_cpu(64)), creditor(nodes.make(64, 64)) {
    for (PeerNode* const node : {borrower.get(), creditor.get()}) {
      ServiceOptions options;
      options.name = node == creditor.get() ? "creditor" : "borrower";
      options.secret = "s3cret";
      options.viewed_max = viewed_max;
      services.push_back(&node->start_service(options));
    }
    services[0]->connect(services[1]->listen(unix_address()), real_seconds(60));
  }
  Addresses borrow(std::size_t n, Medium medium) const {
    return services[0]->alloc("creditor", n, medium, /*may_evict=*/true, in_seconds(20));
  }

  std::shared_ptr<PeerNode> borrower;
  std::shared_ptr<PeerNode> creditor;
  std::vector<Service*> services;
};

TEST_CASE("a peer attends with its GPU to the blocks that it lends") {
  const GpuNodes nodes;
  const Peers peers(nodes);
  const Addresses lent = in_turns(peers.borrow(30, Medium::kHbm), peers.borrow(25, Medium::kDram), 4);
  Pool& own = peers.borrower->pool();
  const Addresses home = alloc(own, 5);
  Addresses blocks = home;
  blocks.insert(blocks.end(), lent.begin(), lent.end());
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    fill_block_of_sequence(nodes.fake(), i < 5 ? own : peers.creditor->pool(), blocks[i], i);
  }
  const std::size_t launches = nodes.fake().count("cuLaunchKernel");
  const auto attend =
      Attend::start(*peers.borrower, two_heads_over(sequence_over(*peers.borrower, blocks)), in_seconds(20));
  CHECK(attend->plan().sequences[0].there.front().second == 55 * kPage);
  check_close(output_of(part_of(*attend), 60 * kPage), expected_output(nodes.fake(), 60));
  CHECK(nodes.fake().count("cuLaunchKernel") > launches);
}

TEST_CASE("a peer's view of blocks on a GPU is answered when the GPU has written them") {
  const GpuNodes nodes;
  const Peers peers(nodes);
  const Addresses lent = peers.borrow(10, Medium::kHbm);
  const EngineStream engine(nodes.fake());
  std::atomic<bool> viewed{false};
  Gate gate(engine);
  engine.run([&] { fill_sequence(nodes.fake(), peers.creditor->pool(), lent); });
  std::shared_ptr<Sequence> sequence;
  std::thread viewer([&] {
    sequence = sequence_over(*peers.borrower, lent);
    viewed = true;
  });
  dawdle();
  CHECK_FALSE(viewed);
  gate.open();
  viewer.join();
  const auto attend = Attend::start(*peers.borrower, two_heads_over(sequence), in_seconds(20));
  check_close(output_of(part_of(*attend), 40), expected_output(nodes.fake(), 10));
}

TEST_CASE("a view that was not written in time is not held, and room for others stays as it was") {
  const GpuNodes nodes;
  const Peers peers(nodes, /*viewed_max=*/10);
  const Addresses lent = peers.borrow(10, Medium::kHbm);
  fill_sequence(nodes.fake(), peers.creditor->pool(), lent);
  const EngineStream engine(nodes.fake());
  for (int turn = 0; turn < 3; ++turn) {
    const Gate gate(engine);
    const auto code = code_of([&] { Sequence(*peers.borrower, lent, std::nullopt, in_seconds(0.05)); });
    CHECK(code == ErrorCode::kDeadline);
  }
  const auto attend = [&] {
    for (const std::int64_t until_ns = in_seconds(10);;) {  // the creditor notices a little later
      try {
        return Attend::start(*peers.borrower, two_heads_over(sequence_over(*peers.borrower, lent)), in_seconds(20));
      } catch (const Error& error) {
        if (error.code() != ErrorCode::kBusy || monotonic_ns() > until_ns) throw;
      }
    }
  }();
  check_close(output_of(part_of(*attend), 40), expected_output(nodes.fake(), 10));
}

TEST_CASE("blocks that are recalled while their view waits for the GPU are counted once") {
  const GpuNodes nodes;
  const Peers peers(nodes, /*viewed_max=*/10);
  const Addresses lent = peers.borrow(10, Medium::kHbm);
  const EngineStream engine(nodes.fake());
  {
    const Gate gate(engine);
    std::thread viewer(
        [&] { static_cast<void>(code_of([&] { Sequence(*peers.borrower, lent, std::nullopt, in_seconds(0.3)); })); });
    dawdle();
    static_cast<void>(code_of([&] { peers.services[1]->recall("borrower", lent, in_seconds(0.05)); }));
    viewer.join();
  }
  const Addresses more = peers.borrow(10, Medium::kDram);
  fill_sequence(nodes.fake(), peers.creditor->pool(), more);
  const auto attend =
      Attend::start(*peers.borrower, two_heads_over(sequence_over(*peers.borrower, more)), in_seconds(20));
  check_close(output_of(part_of(*attend), 40), expected_output(nodes.fake(), 10));
}

}  // namespace
}  // namespace kvpool::testing

#endif  // KVPOOL_FAKE_CUDA
