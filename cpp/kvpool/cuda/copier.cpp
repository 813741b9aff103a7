#include "kvpool/cuda/copier.h"

#include <exception>
#include <new>
#include <utility>

#include "kvpool/base/error.h"
#include "kvpool/cuda/wait_word.h"

namespace kvpool {
namespace {

// Thread blocks of a kernel that leaves most of the GPU to the model, and still keeps a bus or a link busy.
constexpr std::uint32_t kThreadBlocks = 64;
constexpr std::size_t kIdleStreamsMax = 8;

}  // namespace

DeviceCopier::DeviceCopier(std::shared_ptr<const CudaContext> context, const cuda::KernelSet* kernels, const char* what)
    : copier_(std::move(context), kernels, kThreadBlocks, what) {}

void DeviceCopier::warm_up() {
  const CurrentContext current(*context(), copier_.what());
  put_back(take());
}

std::unique_ptr<CudaStream> DeviceCopier::take() {
  {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      auto stream = std::move(idle_.back());
      idle_.pop_back();
      return stream;
    }
  }
  return std::make_unique<CudaStream>(context());
}

void DeviceCopier::put_back(std::unique_ptr<CudaStream> stream) noexcept {
  const std::lock_guard lock(mutex_);
  if (idle_.capacity() == 0) {
    try {
      idle_.reserve(kIdleStreamsMax);
    } catch (const std::bad_alloc&) {
      return;
    }
  }
  if (idle_.size() < kIdleStreamsMax) idle_.push_back(std::move(stream));
}

CuStream DeviceCopier::Run::stream() {
  if (!current_) current_.emplace(*copier_.context(), copier_.copier_.what());
  std::unique_ptr<CudaStream>& stream = parts_.back();
  if (stream == nullptr) stream = copier_.take();
  return stream->handle();
}

std::uint64_t DeviceCopier::Run::copy(std::span<const PlannedStrip> plan, std::span<const Address> from,
                                      std::span<const Address> to, bool merge) {
  if (plan.empty() || from.empty()) return 0;
  return copier_.copier_.copy(stream(), plan, from, to, merge);
}

void DeviceCopier::Run::copy(std::span<const CopyPiece> pieces) {
  if (!pieces.empty()) copier_.copier_.copy(stream(), pieces);
}

void DeviceCopier::Run::wait() {
  // Of a device that is lost nothing is known: its streams are not used again.
  std::unique_ptr<CudaStream> stream = std::move(parts_.front());
  parts_.pop_front();
  if (stream == nullptr) return;
  // Nothing here follows a stream that waits for a word, but the GPU may have put the copy behind it in one queue.
  const CudaContext& context = stream->context();
  if (words_unset(context) && !stream->ends_within(kWordPatienceNs)) force_words(context);
  stream->drain(copier_.copier_.what());
  copier_.put_back(std::move(stream));
}

void DeviceCopier::Run::wait_for_all() {
  std::exception_ptr failure;
  while (!parts_.empty()) {
    try {
      wait();
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kDeviceLost) throw;  // and with it all that is left
      failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

// Returns what put(run) does, when all that it has put there has ended.
template <class Put>
std::uint64_t DeviceCopier::at_once(Put&& put) {
  Run run(*this);
  run.begin();
  std::uint64_t outcome = 0;
  try {
    outcome = put(run);
  } catch (...) {
    // What is under way already must not write into blocks that are somebody else's by then.
    run.wait_for_all();
    throw;
  }
  run.wait_for_all();
  return outcome;
}

std::uint64_t DeviceCopier::copy(std::span<const PlannedStrip> plan, std::span<const Address> from,
                                 std::span<const Address> to, bool merge) {
  return at_once([&](Run& run) { return run.copy(plan, from, to, merge); });
}

void DeviceCopier::copy(std::span<const CopyPiece> pieces) {
  at_once([&](Run& run) {
    run.copy(pieces);
    return pieces.size();
  });
}

}  // namespace kvpool
