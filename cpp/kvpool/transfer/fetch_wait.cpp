// A fetch that streams of this side's GPU wait for.
#include <memory>
#include <mutex>
#include <utility>

#include "kvpool/transfer/fetch.h"

namespace kvpool {
namespace {

constexpr std::int64_t kNsPerMs = 1'000'000;

}  // namespace

// A stream that takes no more may hold this up, so mutex_ is not held meanwhile: the fetch has to end for that to end.
void Fetch::wait_on(const std::shared_ptr<const CudaContext>& context, CuStream stream) {
  const std::lock_guard one_at_a_time(waiting_);
  std::shared_ptr<WaitWord> word;
  bool over = false;
  {
    const Lock lock(mutex_);
    over = phase_ == Phase::kDone;
    word = word_;
  }
  if (!over) {
    std::shared_ptr<HeldBlocks> held;
    if (word == nullptr) {
      BlockHost& blocks = session_->host().blocks();
      held = std::make_shared<HeldBlocks>(blocks, to_);
      word = WaitWord::take(context, deadline_ns_ + kWordPatienceNs);
      blocks.expect_staging_buffer();
    }
    word->hold_up(stream);
    const Lock lock(mutex_);
    over = phase_ == Phase::kDone;
    if (!over && held != nullptr) {
      word_ = word;
      held_ = std::move(held);
    }
  }
  if (!over) return;
  // What the stream may have been given just now finds the word set when this one lets go of it.
  word = nullptr;
  while (!done()) completion_.sleep_until(session_->host().now_ns() + kNsPerMs);  // it is being told
  rethrow_if_failed();
}

// Of a fetch that the owner says is done.
std::optional<Error> Fetch::outcome() const {
  if (word_ == nullptr || !word_->was_forced()) return std::nullopt;
  return Error(ErrorCode::kUnsupported,
               "the stream that waits for this fetch stood before it in a queue of the GPU, and was let go before the "
               "content had come: let this machine's streams wait on the CPU (CUDA_DEVICE_MAX_CONNECTIONS and "
               "CUDA_DEVICE_MAX_COPY_CONNECTIONS say how many queues there are)");
}

}  // namespace kvpool
