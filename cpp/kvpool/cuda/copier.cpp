#include "kvpool/cuda/copier.h"

#include <exception>
#include <new>
#include <utility>

#include "kvpool/base/error.h"
#include "kvpool/cuda/wait_word.h"

namespace kvpool {
namespace {

constexpr std::size_t kIdleStreamsMax = 8;

}  // namespace

DeviceCopier::DeviceCopier(std::shared_ptr<const CudaContext> context, const cuda::KernelSet* kernels,
                           const CopyBounds& bounds, const char* what)
    : copier_(std::move(context), kernels, bounds, kLinkThreadBlocks, what) {}

void DeviceCopier::warm_up() {
  const CurrentContext current(*context(), copier_.what());
  put_back(take(false));
}

void DeviceCopier::add_tables(std::size_t count, std::size_t copies, std::size_t strips, std::size_t pairs) {
  if (copier_.table_bytes(strips, pairs) == 0) return;
  const CurrentContext current(*context(), copier_.what());
  // Each copy has its own part, a little longer than its description.
  const std::size_t bytes = cuda::table_bytes_of(copies * strips, pairs) + copies * CopyTable::length_of(1);
  std::vector<std::unique_ptr<CopyStream>> streams;
  streams.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    auto stream = std::make_unique<CopyStream>(context());
    stream->add_table(bytes);
    if (stream->table() == nullptr) break;
    table_bytes_ += stream->table_bytes();
    streams.push_back(std::move(stream));
  }
  const std::lock_guard lock(mutex_);
  tabled_.swap(streams);
}

std::unique_ptr<CopyStream> DeviceCopier::take(bool with_table) {
  {
    const std::lock_guard lock(mutex_);
    auto& from = with_table && !tabled_.empty() ? tabled_ : idle_;
    if (!from.empty()) {
      auto stream = std::move(from.back());
      from.pop_back();
      return stream;
    }
  }
  // Made in a thread that copies, and perhaps let go of in one: without a table.
  return std::make_unique<CopyStream>(context());
}

void DeviceCopier::put_back(std::unique_ptr<CopyStream> stream) noexcept {
  const std::lock_guard lock(mutex_);
  if (stream->table() != nullptr) return tabled_.push_back(std::move(stream));
  if (idle_.capacity() == 0) {
    try {
      idle_.reserve(kIdleStreamsMax);
    } catch (const std::bad_alloc&) {
      return;
    }
  }
  if (idle_.size() < kIdleStreamsMax) idle_.push_back(std::move(stream));
}

CopyStream& DeviceCopier::Run::stream(bool with_table) {
  if (!current_) current_.emplace(*copier_.context(), copier_.copier_.what());
  std::unique_ptr<CopyStream>& stream = parts_.back();
  if (stream == nullptr) stream = copier_.take(with_table);
  return *stream;
}

std::uint64_t DeviceCopier::Run::copy(GpuWay way, std::span<const PlannedStrip> plan, std::span<const Address> from,
                                      std::span<const Address> to, bool merge) {
  if (plan.empty() || from.empty()) return 0;
  const bool with_table = copier_.copier_.table_bytes(plan.size(), from.size()) > 0;
  const CopyStream& own = stream(with_table);
  return copier_.copier_.copy(own.handle(), way, plan, from, to, merge, own.table());
}

void DeviceCopier::Run::copy(std::span<const CopyPiece> pieces) {
  if (!pieces.empty()) copier_.copier_.copy(stream(false).handle(), pieces);
}

void DeviceCopier::Run::wait() {
  // Of a device that is lost nothing is known: its streams are not used again.
  std::unique_ptr<CopyStream> stream = std::move(parts_.front());
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

std::uint64_t DeviceCopier::copy(GpuWay way, std::span<const PlannedStrip> plan, std::span<const Address> from,
                                 std::span<const Address> to, bool merge) {
  return at_once([&](Run& run) { return run.copy(way, plan, from, to, merge); });
}

void DeviceCopier::copy(std::span<const CopyPiece> pieces) {
  at_once([&](Run& run) {
    run.copy(pieces);
    return pieces.size();
  });
}

}  // namespace kvpool
