#include "kvpool/transfer/request_bytes.h"

#include <cstdint>
#include <string>

#include "kvpool/base/error.h"

namespace kvpool {
namespace {

constexpr std::int64_t kRetryAfterUs = 10'000;

}  // namespace

RequestBytes::Held::~Held() {
  if (of_ != nullptr) of_->held_.fetch_sub(bytes_, std::memory_order_relaxed);
}

RequestBytes::Held RequestBytes::hold(std::size_t bytes, std::size_t bytes_max) {
  Held taken;
  taken.of_ = shared_from_this();
  const std::size_t before = held_.fetch_add(bytes, std::memory_order_relaxed);
  taken.bytes_ = bytes;
  if (before + bytes <= bytes_max) return taken;
  throw Error(ErrorCode::kBusy,
              "requests of this peer take " + std::to_string(before) + " bytes here, and " + std::to_string(bytes) +
                  " more would exceed its limit of " + std::to_string(bytes_max),
              {{"requested", static_cast<std::int64_t>(bytes)},
               {"limit", static_cast<std::int64_t>(bytes_max)},
               {"retry_after_us", kRetryAfterUs}});
}

}  // namespace kvpool
