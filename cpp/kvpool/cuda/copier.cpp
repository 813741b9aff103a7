#include "kvpool/cuda/copier.h"

#include <utility>

#include "kvpool/cuda/wait_word.h"

namespace kvpool {
namespace {

// Thread blocks of a kernel that leaves most of the GPU to the model, and still keeps a bus or a link busy.
constexpr std::uint32_t kThreadBlocks = 64;
constexpr std::size_t kIdleStreamsMax = 8;

}  // namespace

// A stream for one call, drained when it goes back.
class DeviceCopier::Lease {
 public:
  explicit Lease(DeviceCopier& copier) : copier_(copier), stream_(copier.take()) {}
  ~Lease() {
    // Of a device that is lost nothing is known: its streams are not used again.
    if (drained_) copier_.put_back(std::move(stream_));
  }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  CuStream handle() const noexcept { return stream_->handle(); }
  // Nothing here follows a stream that waits for a word, but the GPU may have put the copy behind it in one queue.
  void drain() {
    const CudaContext& context = stream_->context();
    if (words_unset(context) && !stream_->ends_within(kWordPatienceNs)) force_words(context);
    stream_->drain(copier_.copier_.what());
    drained_ = true;
  }

 private:
  DeviceCopier& copier_;
  std::unique_ptr<CudaStream> stream_;
  bool drained_ = false;
};

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

// Returns what put(stream) does, when all that it has put there has ended.
template <class Put>
std::uint64_t DeviceCopier::on_a_stream(Put&& put) {
  const CurrentContext current(*context(), copier_.what());
  Lease lease(*this);
  std::uint64_t outcome = 0;
  try {
    outcome = put(lease.handle());
  } catch (...) {
    // What is under way already must not write into blocks that are somebody else's by then.
    lease.drain();
    throw;
  }
  lease.drain();
  return outcome;
}

std::uint64_t DeviceCopier::copy(std::span<const PlannedStrip> plan, std::span<const Address> from,
                                 std::span<const Address> to, bool merge) {
  if (plan.empty() || from.empty()) return 0;
  return on_a_stream([&](CuStream stream) { return copier_.copy(stream, plan, from, to, merge); });
}

void DeviceCopier::copy(std::span<const CopyPiece> pieces) {
  if (pieces.empty()) return;
  on_a_stream([&](CuStream stream) {
    copier_.copy(stream, pieces);
    return pieces.size();
  });
}

}  // namespace kvpool
