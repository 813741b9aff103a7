#include "kvpool/routes/host/copy_choice.h"

#include <algorithm>

namespace kvpool {
namespace {

constexpr std::uint32_t kPeriod = 32;  // writes; of these the last two try the other way
constexpr float kWeight = 0.25F;       // of a new measurement
constexpr float kOutlier = 2;          // a measurement counts as at most so many times the mean

constexpr std::size_t index_of(CopyWay way) noexcept { return static_cast<std::size_t>(way); }
constexpr CopyWay other(CopyWay way) noexcept {
  return way == CopyWay::kCached ? CopyWay::kStreaming : CopyWay::kCached;
}

// Where a write stands in its period. The first writes try both ways at once.
enum class Turn : std::uint8_t { kFaster, kFasterAgain, kOther, kOtherAgain };

Turn turn_of(std::uint32_t write) noexcept {
  if (write < 4) return static_cast<Turn>(write);
  const std::uint32_t at = write % kPeriod;
  if (at >= kPeriod - 2) return at == kPeriod - 1 ? Turn::kOtherAgain : Turn::kOther;
  return at == 0 || write == 4 ? Turn::kFaster : Turn::kFasterAgain;
}

}  // namespace

CopyChoice::SizeClass& CopyChoice::class_of(std::uint64_t bytes) noexcept {
  std::size_t index = 0;
  for (std::uint64_t limit = std::uint64_t{1} << 20; bytes > limit && index + 1 < kClasses; limit *= 4) ++index;
  return classes_[index];
}

CopyChoice::Pick CopyChoice::pick(std::uint64_t bytes) noexcept {
  if (bytes <= kCachedMax) return {CopyWay::kCached, false};
  if (bytes > kStreamingMin) return {CopyWay::kStreaming, false};
  SizeClass& size = class_of(bytes);
  const Turn turn = turn_of(size.writes.fetch_add(1, std::memory_order_relaxed));
  const float cached = size.us_per_mib[index_of(CopyWay::kCached)].load(std::memory_order_relaxed);
  const float streaming = size.us_per_mib[index_of(CopyWay::kStreaming)].load(std::memory_order_relaxed);
  // Not measured counts as fast for the first one and as slow for the second.
  const CopyWay faster = streaming > 0 && streaming < cached ? CopyWay::kStreaming : CopyWay::kCached;
  const bool again = turn == Turn::kFasterAgain || turn == Turn::kOtherAgain;
  return {turn == Turn::kFaster || turn == Turn::kFasterAgain ? faster : other(faster), again};
}

void CopyChoice::took(const Pick& pick, std::uint64_t bytes, double us) noexcept {
  if (!pick.counts || bytes == 0) return;
  std::atomic<float>& mean = class_of(bytes).us_per_mib[index_of(pick.way)];
  const float before = mean.load(std::memory_order_relaxed);
  const auto sample = static_cast<float>(us * (1 << 20) / static_cast<double>(bytes));
  const float next = before > 0 ? before + kWeight * (std::min(sample, kOutlier * before) - before) : sample;
  mean.store(next, std::memory_order_relaxed);
}

}  // namespace kvpool
