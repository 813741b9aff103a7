// Words that streams wait for: the order, words that are used again, failures.
#include "kvpool/cuda/wait_word.h"

#include <doctest/doctest.h>
#include <stdlib.h>

#include <atomic>
#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "device_kit.h"
#include "fuzz_seeds.h"
#include "kvpool/cuda/copier.h"
#include "kvpool/cuda/poll_backoff.h"
#include "thrown.h"

#ifdef KVPOOL_FAKE_CUDA

namespace kvpool::testing {
namespace {

constexpr std::uint32_t kPageWords = 1024;
constexpr std::int64_t kLongNs = 600'000'000'000;

std::shared_ptr<WaitWord> take(const std::shared_ptr<const CudaContext>& context, std::int64_t for_ns = kLongNs) {
  return WaitWord::take(context, PollBackoff::now_ns() + for_ns);
}

TEST_CASE("a stream resumes when its word is set, and sees all that was written before; other streams do not wait") {
  const FakeCuda cuda;
  const auto context = CudaContext::retain(0, "a test");
  const EngineStream waits(cuda);
  const EngineStream goes_on(cuda);
  int value = 0;  // of two threads that nothing else orders
  int seen = 0;
  std::atomic<bool> ran{false};
  const auto word = take(context);
  CHECK(words_unset(*context));
  word->hold_up(waits.handle());
  waits.run([&] {
    seen = value;
    ran = true;
  });
  goes_on.run([] {});
  goes_on.wait();
  CHECK_FALSE(ran);
  value = 7;
  word->set();
  word->set();
  waits.wait();
  CHECK(seen == 7);
  CHECK_FALSE(words_unset(*context));
  CHECK_FALSE(word->was_forced());
  word->hold_up(waits.handle());  // passes
  waits.wait();
  CHECK(cuda.count("waits passed") == 2);
}

TEST_CASE("a wait in one stream does not break the capture of a graph in another") {
  const FakeCuda cuda;
  const auto context = CudaContext::retain(0, "a test");
  const EngineStream engine(cuda);
  cuda.set("capturing", 1);
  const auto word = take(context);
  word->hold_up(engine.handle());
  cuda.set("capturing", 0);
  CHECK(cuda.count("captures broken") == 0);
  word->set();
  engine.wait();
}

TEST_CASE("releasing a word resumes its stream") {
  const FakeCuda cuda;
  const auto context = CudaContext::retain(0, "a test");
  const EngineStream engine(cuda);
  take(context)->hold_up(engine.handle());
  engine.wait();
  CHECK(cuda.count("waits passed") == 1);
  CHECK_FALSE(words_unset(*context));
}

TEST_CASE("thousands of words share two pages, and each stream waits for its own") {
  const FakeCuda cuda;
  cuda.set("delay_us", 0);
  const auto context = CudaContext::retain(0, "a test");
  std::vector<std::unique_ptr<EngineStream>> engines;
  for (int i = 0; i < 4; ++i) engines.push_back(std::make_unique<EngineStream>(cuda));
  constexpr std::size_t kWords = 6000;
  constexpr std::size_t kAtOnce = kPageWords + 100;
  std::vector<std::atomic<bool>> may_run(kWords);
  std::atomic<std::size_t> ran{0};
  std::atomic<std::size_t> early{0};
  std::deque<std::pair<std::size_t, std::shared_ptr<WaitWord>>> words;
  const auto set_first = [&] {
    may_run[words.front().first] = true;
    words.front().second->set();
    words.pop_front();
  };
  for (std::size_t i = 0; i < kWords; ++i) {
    words.emplace_back(i, take(context));
    const EngineStream& engine = *engines[i % engines.size()];
    words.back().second->hold_up(engine.handle());
    engine.run([&, i] {
      ++ran;
      if (!may_run[i]) ++early;
    });
    if (words.size() > kAtOnce) set_first();
  }
  while (!words.empty()) set_first();
  for (const auto& engine : engines) engine->wait();
  CHECK(ran == kWords);
  CHECK(early == 0);
  CHECK(cuda.count("cuMemHostRegister") <= 2);
}

TEST_CASE("a stream that reads its word late does not wait, even if the word has another user by then") {
  const FakeCuda cuda;
  const auto context = CudaContext::retain(0, "a test");
  const EngineStream engine(cuda);
  Gate gate(engine);
  auto word = take(context);
  word->hold_up(engine.handle());
  word->set();
  word = nullptr;
  // The word has many users meanwhile, and one that has not set it.
  for (std::uint32_t i = 0; i < 4 * kPageWords; ++i) take(context);
  std::vector<std::shared_ptr<WaitWord>> others;
  for (std::uint32_t i = 0; i < 2 * kPageWords; ++i) others.push_back(take(context));
  gate.open();
  engine.wait();
  CHECK(cuda.count("waits passed") == 1);
}

TEST_CASE("forced words resume their streams, and the force is reported") {
  const FakeCuda cuda;
  const auto context = CudaContext::retain(0, "a test");
  const auto other_gpu = CudaContext::retain(1, "a test");
  const EngineStream engine(cuda);
  const auto before = take(context);
  before->set();
  const auto word = take(context);
  const auto other = take(other_gpu);
  word->hold_up(engine.handle());
  force_words(*context);
  engine.wait();
  CHECK(word->was_forced());
  CHECK_FALSE(before->was_forced());
  CHECK_FALSE(other->was_forced());
  CHECK_FALSE(words_unset(*context));
  CHECK(words_unset(*other_gpu));
}

TEST_CASE("a word that is not set in time is forced, and no other word is") {
  const FakeCuda cuda;
  const auto context = CudaContext::retain(0, "a test");
  const EngineStream engine(cuda);
  const auto other = take(context);
  std::vector<std::shared_ptr<WaitWord>> words;
  for (int i = 5; i > 0; --i) {
    words.push_back(take(context, i * 10'000'000));
    words.back()->hold_up(engine.handle());
  }
  engine.wait();
  for (const auto& word : words) CHECK(word->was_forced());
  CHECK_FALSE(other->was_forced());
  const auto late = take(context, -1);
  late->hold_up(engine.handle());
  engine.wait();
  CHECK(late->was_forced());
}

TEST_CASE("the wait for a copy that the GPU queued behind a waiting stream has a bound") {
  const FakeCuda cuda;
  const auto context = CudaContext::retain(0, "a test");
  const EngineStream engine(cuda);
  DeviceCopier copier(context, nullptr, {}, "a test");
  CuPointer memory = 0;
  {
    const CurrentContext current(*context, "a test");
    REQUIRE(context->driver().mem_alloc(&memory, 128) == 0);
  }
  auto* const bytes = reinterpret_cast<std::byte*>(memory);
  const CopyPiece piece{bytes + 64, bytes, 64};
  for (const bool one_queue : {false, true}) {
    CAPTURE(one_queue);
    cuda.set("one_queue", one_queue ? 1 : 0);
    const auto word = take(context);
    word->hold_up(engine.handle());
    copier.copy({&piece, 1});
    CHECK(word->was_forced() == one_queue);
    word->set();
    engine.wait();
  }
  const CurrentContext current(*context, "a test");
  CHECK(context->driver().mem_free(memory) == 0);
}

TEST_CASE("with one queue to the GPU no stream waits for a word") {
  const FakeCuda cuda;
  const auto context = CudaContext::retain(0, "a test");
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1", 1);
  std::string text;
  CHECK(code_of([&] { take(context); }, &text) == ErrorCode::kUnsupported);
  CHECK(text.find("CUDA_DEVICE_MAX_CONNECTIONS is 1") != std::string::npos);
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8", 1);
  CHECK_FALSE(words_unset(*context));
  take(context)->set();
  unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
}

TEST_CASE("waits for a whole GPU and waits for words exclude each other") {
  const FakeCuda cuda;
  const auto context = CudaContext::retain(0, "a test");
  {
    const auto word = take(context);
    CHECK(code_of([&] { const Standstill standstill(*context); }) == ErrorCode::kRouteFailed);
    word->set();
    const Standstill standstill(*context);
    CHECK(code_of([&] { take(context); }) == ErrorCode::kBusy);
    take(CudaContext::retain(1, "a test"));  // another GPU goes on
  }
  take(context);
}

TEST_CASE("a stream that cannot wait for a word says why, and the word is free for others") {
  const FakeCuda cuda;
  const auto context = CudaContext::retain(0, "a test");
  const EngineStream engine(cuda);
  const EngineStream other_gpu(cuda, 1);
  const auto word = take(context);
  CHECK(code_of([&] { word->hold_up(other_gpu.handle()); }) == ErrorCode::kArgument);
  engine.begin_capture();
  CHECK(code_of([&] { word->hold_up(engine.handle()); }) == ErrorCode::kState);
  engine.end_capture();
  cuda.set("wait_value", 0);
  std::string text;
  CHECK(code_of([&] { word->hold_up(engine.handle()); }, &text) == ErrorCode::kUnsupported);
  CHECK(text.find("cuStreamWaitValue32") != std::string::npos);
  cuda.fail("cuStreamWaitValue32", 719);
  CHECK(code_of([&] { word->hold_up(engine.handle()); }) == ErrorCode::kDeviceLost);
  engine.wait();
  CHECK(cuda.count("waits passed") == 0);
}

TEST_CASE("after any driver call fails while a word is taken, the next caller gets the word") {
  for (int n = 1;; ++n) {
    CAPTURE(n);
    const FakeCuda cuda;  // a page is to be registered again
    const auto context = CudaContext::retain(0, "a test");
    cuda.fail_nth(n, 304);
    const auto code = code_of([&] { take(context); });
    const bool reached = cuda.failed();
    cuda.fail_nth(0, 0);
    if (code) CHECK(*code == ErrorCode::kUnsupported);
    CHECK_FALSE(words_unset(*context));
    const EngineStream engine(cuda);
    take(context)->hold_up(engine.handle());
    engine.wait();
    if (!reached) break;
  }
}

TEST_CASE("words are taken, waited for, set and forced by many threads at once") {
  const FakeCuda cuda;
  cuda.set("delay_us", 0);
  const auto context = CudaContext::retain(0, "a test");
  std::atomic<int> ran{0};
  std::atomic<bool> over{false};
  std::thread forces([&] {
    while (!over) force_words(*context);
  });
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      const EngineStream engine(cuda);
      for (int i = 0; i < 300; ++i) {
        const auto word = take(context);
        word->hold_up(engine.handle());
        engine.run([&] { ++ran; });
        if (i % 3 != 0) word->set();
      }
      engine.wait();
    });
  }
  for (std::thread& thread : threads) thread.join();
  over = true;
  forces.join();
  CHECK(ran == 900);
  CHECK_FALSE(words_unset(*context));
}

}  // namespace
}  // namespace kvpool::testing

#endif  // KVPOOL_FAKE_CUDA
