// What of a cache is worth writing to disk, and how fast. Pure: no clock, thread or file.
#pragma once

#include <algorithm>
#include <cstdint>

namespace kvpool {

enum class DiskAdmission : std::uint8_t {
  kAlways,       // everything that is cached
  kOnSecondUse,  // what was used twice: stored, and then matched
};

// `matches`: how often a page was matched since it was stored.
inline constexpr bool admits(DiskAdmission admission, std::uint32_t matches) noexcept {
  return admission == DiskAdmission::kAlways || matches >= 1;
}

// Bytes a second and a day, over all that is written, by whatever way. 0: no limit. As much at once as one second has;
// what a write takes beyond it is owed. A day begins with the first write after the last one has ended.
class ByteBudget {
 public:
  static constexpr std::int64_t kSecondNs = 1'000'000'000;
  static constexpr std::int64_t kDayNs = 86'400 * kSecondNs;

  ByteBudget(std::uint64_t bytes_s, std::uint64_t bytes_day) noexcept
      : bytes_s_(static_cast<double>(bytes_s)), bytes_day_(bytes_day), left_(bytes_s_) {}

  // How long to wait before the next write, from `now` on; 0: not at all.
  std::int64_t wait_ns(std::int64_t now) noexcept {
    refill(now);
    std::int64_t wait = 0;
    if (bytes_s_ > 0 && left_ < 0) wait = static_cast<std::int64_t>(-left_ / bytes_s_ * 1e9) + 1;
    if (bytes_day_ > 0 && today_ >= bytes_day_) wait = std::max(wait, day_ + kDayNs - now);
    return wait;
  }
  // So many bytes are written now.
  void charge(std::uint64_t bytes, std::int64_t now) noexcept {
    refill(now);
    left_ -= static_cast<double>(bytes);
    today_ += bytes;
  }
  std::uint64_t today() const noexcept { return today_; }

 private:
  void refill(std::int64_t now) noexcept {
    if (day_ == 0 || now - day_ >= kDayNs) {
      day_ = now;
      today_ = 0;
    }
    if (at_ != 0) left_ = std::min(bytes_s_, left_ + static_cast<double>(now - at_) / 1e9 * bytes_s_);
    at_ = now;
  }

  const double bytes_s_;
  const std::uint64_t bytes_day_;
  double left_;
  std::int64_t at_ = 0;
  std::int64_t day_ = 0;
  std::uint64_t today_ = 0;
};

}  // namespace kvpool
