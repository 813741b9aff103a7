// How long pieces of work of one kind take here: a fixed time and a time for each unit, fitted to the last few dozen.
//
// Thread-safety: all of it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <optional>

namespace kvpool {

class Pace {
 public:
  // `units`: of whatever kind, the same for all calls. Work that took no time at all is not counted.
  void record(double units, std::int64_t ns, std::int64_t now_ns) noexcept {
    const std::lock_guard lock(mutex_);
    const double x = units;
    const auto y = static_cast<double>(ns);
    n_ = n_ * kKept + 1;
    x_ = x_ * kKept + x;
    y_ = y_ * kKept + y;
    xx_ = xx_ * kKept + x * x;
    xy_ = xy_ * kKept + x * y;
    last_ns_ = now_ns;
  }

  // Nanoseconds; nullopt before the first piece.
  std::optional<double> estimate_ns(double units) const noexcept {
    const std::lock_guard lock(mutex_);
    if (n_ == 0) return std::nullopt;
    const double spread = n_ * xx_ - x_ * x_;
    // All of one size: then time is taken to grow with size, which is what a fit through many sizes tends to say.
    if (spread <= 1e-6 * n_ * xx_) return x_ > 0 ? y_ * std::max(units / (x_ / n_), 0.0) / n_ : y_ / n_;
    const double slope = std::max((n_ * xy_ - x_ * y_) / spread, 0.0);
    const double fixed = std::max((y_ - slope * x_) / n_, 0.0);
    return fixed + slope * units;
  }

  // When a piece was recorded last; 0: never.
  std::int64_t last_ns() const noexcept {
    const std::lock_guard lock(mutex_);
    return last_ns_;
  }

 private:
  static constexpr double kKept = 0.95;  // of the weight of earlier pieces

  mutable std::mutex mutex_;
  double n_ = 0, x_ = 0, y_ = 0, xx_ = 0, xy_ = 0;  // sums over the pieces, earlier ones with less weight
  std::int64_t last_ns_ = 0;
};

}  // namespace kvpool
