// Attention on a fake GPU: the tables that a call makes, how its kernels are loaded and launched, and its errors.
// Checks A14 to A16 of cpp/kvpool/attend_gpu.
#include <doctest/doctest.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "device_kit.h"
#include "fuzz_seeds.h"
#include "gpu_attention_kit.h"
#include "kvpool/base/clock.h"
#include "soon.h"
#include "thrown.h"

#ifdef KVPOOL_FAKE_CUDA

namespace kvpool::testing {
namespace {

struct Wanted {
  std::uint32_t query_heads = 4;
  std::uint32_t kv_heads = 2;
  std::uint32_t query_tokens = 1;
  std::uint32_t head_dim = 64;
  DType dtype = DType::kFloat16;
  BlockForm form;
  TokenRange range{0, 100};
  bool causal = true;
};

std::vector<PartialAttention> attended(const AttendingGpu& gpu, const AttendCall& call) {
  return gpu.gpu().attend(call, gpu.gpu().plan(call));
}

std::unique_ptr<GpuAttention> load16(const std::shared_ptr<const CudaContext>& context,
                                     std::span<const AttentionCubin> cubins) {
  return GpuAttention::load(context, DType::kFloat16, 64, cubins);
}

// One sequence, in the memory of the CPU and of the GPU.
class Sequence {
 public:
  Sequence(const AttendingGpu& gpu, const Wanted& wanted, Dice& dice, std::size_t shift = 0)
      : wanted_(wanted),
        content_(wanted.kv_heads, wanted.head_dim, wanted.dtype, wanted.range.end, dice),
        table_begin_(wanted.range.begin - wanted.range.begin % (4 * wanted.form.block_tokens)),
        memory_(content_, wanted.form, wanted.range, table_begin_),
        q_(wanted.dtype, std::size_t{wanted.query_tokens} * wanted.query_heads * wanted.head_dim, 1.0, dice) {
    const std::uint64_t query_begin = wanted.range.end - std::min<std::uint64_t>(wanted.query_tokens, wanted.range.end);
    here_ = memory_.item(q_, wanted.query_tokens, query_begin);
    const PageFormat format{wanted.kv_heads, wanted.head_dim, wanted.dtype, wanted.form.tokens_first,
                            wanted.form.fused};
    const std::size_t piece = format.row_bytes() * wanted.kv_heads * wanted.form.block_tokens;
    const std::size_t bytes = wanted.form.aggregated ? piece * format.pieces_per_layer() * KVMemory::kLayers : piece;
    there_.emplace(gpu, here_, bytes, shift);
  }

  const AttendItem& here() const { return here_; }
  const AttendItem& there() const { return there_->item(); }

  AttendCall call(const AttendItem& item) const {
    AttendCall call;
    call.kv = memory_.rows();
    call.query_heads = wanted_.query_heads;
    call.query_dtype = wanted_.dtype;
    call.causal = wanted_.causal;
    call.items = {&item, 1};
    return call;
  }
  std::vector<PartialAttention> on_cpu() const {
    AttendSettings settings;
    settings.kernel = attention_kernels().back();
    return attend(call(here_), {}, settings);
  }
  std::vector<PartialAttention> on_gpu(const AttendingGpu& gpu) const { return attended(gpu, call(there())); }

 private:
  const Wanted wanted_;
  const KVContent content_;
  const std::uint64_t table_begin_;
  const KVMemory memory_;
  const Elements q_;
  AttendItem here_;
  std::optional<BlocksOnGpu> there_;
};

void check_same(const PartialAttention& got, const PartialAttention& expected) {
  REQUIRE(got.nodes().size() == expected.nodes().size());
  for (std::size_t i = 0; i < got.nodes().size(); ++i) {
    const PartialNode& a = got.nodes()[i];
    const PartialNode& b = expected.nodes()[i];
    CHECK(a.range.begin == b.range.begin);
    CHECK(a.range.end == b.range.end);
    CHECK(a.exact);
    CHECK(a.kernel == KernelId{AttentionIsa::kSm90, 1});
    REQUIRE(a.values.size() == b.values.size());
    CHECK(std::memcmp(a.values.data(), b.values.data(), a.values.size() * sizeof(float)) == 0);
  }
}

void check_sequence(const AttendingGpu& gpu, const Wanted& wanted, Dice& dice) {
  const Sequence sequence(gpu, wanted, dice);
  const std::vector<PartialAttention> got = sequence.on_gpu(gpu);
  REQUIRE(got.size() == 1);
  check_same(got[0], sequence.on_cpu()[0]);
}

TEST_CASE("attention on a GPU has the nodes of the CPU, merged along the same tree") {
  Dice dice(11);
  const AttendingGpu gpu;
  for (const TokenRange range :
       {TokenRange{0, 1}, {0, 64}, {5, 100}, {0, 1024}, {1000, 1100}, {1024, 4096}, {0, 7300}}) {
    CAPTURE(range.begin);
    CAPTURE(range.end);
    Wanted wanted;
    wanted.range = range;
    check_sequence(gpu, wanted, dice);
  }
  CHECK(gpu.fake().count("loaded at a launch") == 0);
  CHECK(gpu.fake().count("pageable") == 0);
}

TEST_CASE("attention on a GPU reads every layout and block size, for all groups of heads and query tokens") {
  Dice dice(12);
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBfloat16}) {
    const AttendingGpu gpu(dtype, 128);
    for (int i = 0; i < thread_length(12); ++i) {
      Wanted wanted;
      wanted.dtype = dtype;
      wanted.head_dim = 128;
      wanted.kv_heads = 1 + static_cast<std::uint32_t>(dice.below(3));
      wanted.query_heads = wanted.kv_heads * (1 + static_cast<std::uint32_t>(dice.below(5)));
      wanted.query_tokens = 1 + static_cast<std::uint32_t>(dice.below(kQueryTokensMax));
      wanted.form = any_form(dice);
      wanted.range.begin = dice.below(1200);
      wanted.range.end = wanted.range.begin + 1 + dice.below(1500);
      wanted.causal = dice.one_in(2);
      check_sequence(gpu, wanted, dice);
    }
  }
}

TEST_CASE("a batch on a GPU has sequences of many lengths, some of them empty") {
  Dice dice(13);
  const AttendingGpu gpu;
  std::vector<std::unique_ptr<Sequence>> sequences;
  std::vector<AttendItem> items;
  for (const std::uint64_t tokens : {1U, 0U, 2100U, 33U, 0U, 1024U}) {
    Wanted wanted;
    wanted.range = {0, tokens};
    wanted.query_tokens = 1 + static_cast<std::uint32_t>(items.size());
    sequences.push_back(std::make_unique<Sequence>(gpu, wanted, dice));
    items.push_back(sequences.back()->there());
  }
  AttendCall call = sequences[0]->call(items[0]);
  call.items = items;
  const std::vector<PartialAttention> got = attended(gpu, call);
  REQUIRE(got.size() == items.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    CHECK(got[i].shape().tokens == items[i].query_tokens);
    check_same(got[i], sequences[i]->on_cpu()[0]);
  }
  call.items = std::span(items).subspan(1, 1);
  CHECK(attended(gpu, call)[0].empty());
  call.items = {};
  CHECK(attended(gpu, call).empty());
}

TEST_CASE("a query that stands far before a leaf sees nothing of it") {
  Dice dice(14);
  const AttendingGpu gpu;
  Wanted wanted;
  wanted.range = {0, 3000};
  wanted.query_tokens = 16;
  const Sequence sequence(gpu, wanted, dice);
  AttendItem here = sequence.here();
  AttendItem there = sequence.there();
  here.query_begin = there.query_begin = 3;
  AttendSettings settings;
  settings.kernel = attention_kernels().back();
  const std::vector<PartialAttention> expected = attend(sequence.call(here), {}, settings);
  check_same(attended(gpu, sequence.call(there))[0], expected[0]);
}

TEST_CASE("what no kernel can do is Unsupported, and nothing is put into a stream") {
  Dice dice(15);
  const AttendingGpu gpu;
  const Sequence sequence(gpu, {}, dice);
  const std::size_t launches = gpu.fake().count("cuLaunchKernel");
  const auto code = [&](const AttendCall& call) { return code_of([&] { (void)attended(gpu, call); }); };
  AttendCall call = sequence.call(sequence.there());
  call.kv.head_dim = 32;
  CHECK(code(call) == ErrorCode::kUnsupported);
  call = sequence.call(sequence.there());
  call.query_dtype = DType::kFloat32;
  CHECK(code(call) == ErrorCode::kUnsupported);
  call = sequence.call(sequence.there());
  call.kv.dtype = DType::kFloat8E4M3;
  CHECK(code(call) == ErrorCode::kUnsupported);
  call = sequence.call(sequence.there());
  call.kv.dtype = call.query_dtype = DType::kBfloat16;  // of which this GPU has no kernel here
  CHECK(code(call) == ErrorCode::kUnsupported);
  call = sequence.call(sequence.there());
  call.kv.token_stride += 2;
  CHECK(code(call) == ErrorCode::kUnsupported);
  call = sequence.call(sequence.there());
  call.kv.k_offset += 8;
  CHECK(code(call) == ErrorCode::kUnsupported);
  const Sequence shifted(gpu, {}, dice, 8);
  CHECK(code(shifted.call(shifted.there())) == ErrorCode::kUnsupported);
  call = sequence.call(sequence.there());
  call.query_heads = 3;
  CHECK(code(call) == ErrorCode::kArgument);
  CHECK(gpu.fake().count("cuLaunchKernel") == launches);
  check_same(sequence.on_gpu(gpu)[0], sequence.on_cpu()[0]);
}

TEST_CASE("kernels are chosen by the GPU, and a GPU that cannot run them has none") {
  const FakeCuda cuda;
  {
    const auto context = CudaContext::retain(0, "a test");
    const FakeCubins for_80(80, DType::kFloat16, 64);
    const FakeCubins for_90(90, DType::kFloat16, 64);
    CHECK(load16(context, std::span<const AttentionCubin>()) == nullptr);
    CHECK(load16(context, for_80.table) == nullptr);
    CHECK(GpuAttention::load(context, DType::kFloat16, 128, for_90.table) == nullptr);
    CHECK(GpuAttention::load(context, DType::kBfloat16, 64, for_90.table) == nullptr);
    const auto gpu = load16(context, for_90.table);
    REQUIRE(gpu != nullptr);
    CHECK(kernel_name(gpu->kernel()) == "sm90/1");
    const FakeCubins too_much(90, DType::kFloat16, 64, 240000);
    CHECK(load16(context, too_much.table) == nullptr);
    const FakeCubins much(90, DType::kFloat16, 64, 200000);
    CHECK(load16(context, much.table) != nullptr);
    CHECK(cuda.count("cuFuncSetAttribute") == 1);
    for (const int lasting : {209, 500, 801}) {
      cuda.fail("cuModuleGetFunction", lasting);
      CHECK(load16(context, for_90.table) == nullptr);
    }
    cuda.fail("cuModuleGetFunction", 2);
    CHECK(code_of([&] { (void)load16(context, for_90.table); }) == ErrorCode::kOutOfMemory);
    cuda.fail("cuModuleGetFunction", 0);
  }
  CHECK(cuda.left() == "");
  CHECK(runs_on(80, 8, 6));
  CHECK(runs_on(80, 8, 0));
  CHECK(!runs_on(80, 9, 0));
  CHECK(!runs_on(90, 8, 9));
  CHECK(runs_on(100, 10, 0));
  CHECK(!runs_on(100, 10, 3));
  CHECK(!runs_on(90, 12, 0));
}

TEST_CASE("whichever call of the driver fails, attention on a GPU says so and works the next time") {
  Dice dice(16);
  const AttendingGpu gpu;
  Wanted wanted;
  wanted.range = {0, 2048};
  const Sequence sequence(gpu, wanted, dice);
  const std::vector<PartialAttention> expected = sequence.on_cpu();
  int failures = 0;
  for (int n = 1;; ++n) {
    CAPTURE(n);
    gpu.fake().fail_nth(n, 801);
    try {
      (void)sequence.on_gpu(gpu);
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::kUnsupported);
    }
    const bool failed = gpu.fake().failed();
    gpu.fake().fail_nth(0, 0);
    if (!failed) break;
    ++failures;
    check_same(sequence.on_gpu(gpu)[0], expected[0]);
  }
  CHECK(failures >= 6);  // the context, both copies, two launches, the end of the stream
}

TEST_CASE("attention on a GPU that is lost is DeviceLost, then and later") {
  Dice dice(17);
  const AttendingGpu gpu;
  const Sequence sequence(gpu, {}, dice);
  (void)sequence.on_gpu(gpu);
  gpu.say([](const fake_cuda::FakeLaunch&) { return kIllegalAddress; }, MergesByCpu(64));
  CHECK(code_of([&] { (void)sequence.on_gpu(gpu); }) == ErrorCode::kDeviceLost);
  gpu.fake().lose(0, 0);  // so that what the test took can be given back
  const std::size_t launches = gpu.fake().count("cuLaunchKernel");
  CHECK(code_of([&] { (void)sequence.on_gpu(gpu); }) == ErrorCode::kDeviceLost);
  CHECK(gpu.fake().count("cuLaunchKernel") == launches);
}

TEST_CASE("what the caller does meanwhile is done while the GPU works, and what it throws ends the call") {
  Dice dice(18);
  const AttendingGpu gpu;
  const Sequence sequence(gpu, {}, dice);
  const AttendCall call = sequence.call(sequence.there());
  const LeafPlan plan = gpu.gpu().plan(call);
  const std::size_t waits = gpu.fake().count("cuStreamSynchronize");
  const std::size_t launches = gpu.fake().count("cuLaunchKernel");
  bool launched = false;
  const auto got = gpu.gpu().attend(call, plan, [&] {
    launched = gpu.fake().count("cuLaunchKernel") > launches && gpu.fake().count("cuStreamSynchronize") == waits;
  });
  CHECK(launched);
  check_same(got[0], sequence.on_cpu()[0]);
  CHECK(code_of([&] { (void)gpu.gpu().attend(call, plan, [] { throw Error(ErrorCode::kCancelled, "a test"); }); }) ==
        ErrorCode::kCancelled);
  check_same(sequence.on_gpu(gpu)[0], got[0]);
}

TEST_CASE("a call that takes its time keeps no other from the GPU, and one that finds no slot looks at its deadline") {
  Dice dice(21);
  const AttendingGpu gpu;
  const Sequence sequence(gpu, {}, dice);
  const AttendCall call = sequence.call(sequence.there());
  const LeafPlan plan = gpu.gpu().plan(call);
  std::atomic<std::size_t> begun{0};
  std::atomic<bool> over{false};
  std::vector<std::thread> slow;
  const auto occupy = [&] {
    const std::size_t before = begun;
    slow.emplace_back([&] {
      (void)gpu.gpu().attend(call, plan, [&] {
        ++begun;
        sleep_while([&] { return !over; });
      });
    });
    sleep_while([&] { return begun == before; });
  };
  occupy();
  check_same(sequence.on_gpu(gpu)[0], sequence.on_cpu()[0]);
  while (begun < GpuAttention::kSlotsMax) occupy();
  AttendStop stop;
  stop.until_ns = monotonic_ns() + 20'000'000;
  CHECK(code_of([&] { (void)gpu.gpu().attend(call, plan, {}, &stop); }) == ErrorCode::kDeadline);
  AttendStop cancelled;
  cancelled.asked = true;
  CHECK(code_of([&] { (void)gpu.gpu().attend(call, plan, {}, &cancelled); }) == ErrorCode::kCancelled);
  over = true;
  for (std::thread& thread : slow) thread.join();
  check_same(sequence.on_gpu(gpu)[0], sequence.on_cpu()[0]);
}

TEST_CASE("a longer call than before does not wait for all work of the GPU") {
  Dice dice(22);
  const AttendingGpu gpu;
  gpu.fake().set("unmap_waits", 1);
  const EngineStream engine(gpu.fake());
  Wanted wanted;
  wanted.query_tokens = 16;
  wanted.query_heads = 32;  // 135 KB of results for each leaf
  wanted.range = {0, 20};
  const Sequence sequence(gpu, wanted, dice);
  const Gate gate(engine);  // a stream that stands
  for (const std::size_t items : {1U, 12U, 30U}) {
    const std::vector<AttendItem> same(items, sequence.there());
    AttendCall call = sequence.call(sequence.there());
    call.items = same;
    const auto got = attended(gpu, call);
    REQUIRE(got.size() == items);
    check_same(got.back(), sequence.on_cpu()[0]);
  }
}

TEST_CASE("threads that ask one GPU for attention do not disturb each other") {
  Dice dice(19);
  const AttendingGpu gpu;
  std::vector<std::unique_ptr<Sequence>> sequences;
  for (const std::uint64_t tokens : {100U, 1500U, 3000U}) {
    Wanted wanted;
    wanted.range = {0, tokens};
    sequences.push_back(std::make_unique<Sequence>(gpu, wanted, dice));
  }
  std::vector<std::vector<PartialAttention>> got(sequences.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    threads.emplace_back([&, i] {
      for (int n = 0; n < 4; ++n) got[i] = sequences[i]->on_gpu(gpu);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (std::size_t i = 0; i < sequences.size(); ++i) check_same(got[i][0], sequences[i]->on_cpu()[0]);
}

}  // namespace
}  // namespace kvpool::testing

#endif  // KVPOOL_FAKE_CUDA
