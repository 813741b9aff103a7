#include "kvpool/routes/route_cost.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace kvpool {
namespace {

constexpr double kWeight = 0.2;       // of a new measurement
constexpr double kStepMax = 1.1;      // an outlier counts as three times what was expected, or a third: ln 3
constexpr double kCorrectionMax = 5;  // a factor of 150
constexpr double kFadeMs = 5000;

std::uint32_t milliseconds(std::int64_t now_ns) noexcept {
  // 0 stands for "never".
  return std::max<std::uint32_t>(static_cast<std::uint32_t>(now_ns / 1'000'000), 1);
}

// 0 up to `smallest`, one more for each factor of four, at most `classes` - 1.
std::size_t class_of(std::uint64_t value, int smallest_bits, std::size_t classes) noexcept {
  const int bits = std::bit_width(value > 0 ? value - 1 : 0);
  return bits <= smallest_bits ? 0 : std::min(static_cast<std::size_t>(bits - smallest_bits + 1) / 2, classes - 1);
}

std::uint64_t pack(double correction, std::uint32_t now_ms) noexcept {
  return (std::uint64_t{std::bit_cast<std::uint32_t>(static_cast<float>(correction))} << 32) | now_ms;
}

}  // namespace

std::size_t RouteCost::cell_of(const WriteSize& size) noexcept {
  const std::size_t by_bytes = class_of(size.bytes, 12, kByteClasses);
  const std::size_t by_piece = class_of(size.bytes / std::max<std::uint64_t>(size.pieces, 1), 10, kPieceClasses);
  return by_bytes * kPieceClasses + by_piece;
}

double RouteCost::faded(std::uint64_t word, std::uint32_t now_ms) noexcept {
  const double correction = std::bit_cast<float>(static_cast<std::uint32_t>(word >> 32));
  const auto age_ms = static_cast<std::int32_t>(now_ms - static_cast<std::uint32_t>(word));  // the clock may wrap
  return age_ms <= 0 ? correction : correction * std::exp(-age_ms / kFadeMs);
}

void RouteCost::correct(Cell& cell, double sample, std::uint32_t now_ms) noexcept {
  const std::uint64_t word = cell.load(std::memory_order_relaxed);
  double next = std::clamp(sample, -kStepMax, kStepMax);
  if (word != 0) {
    const double before = faded(word, now_ms);
    next = before + kWeight * std::clamp(sample - before, -kStepMax, kStepMax);
  }
  cell.store(pack(std::clamp(next, -kCorrectionMax, kCorrectionMax), now_ms), std::memory_order_relaxed);
}

double RouteCost::expected_us(const Table& table, const WriteSize& size) const noexcept {
  const double calls_us = is_apart(size) ? us_per_call_ * static_cast<double>(size.pieces) : 0;
  return table.write.us(size) + calls_us;
}

double RouteCost::estimate_us(const Table& table, const WriteSize& size, std::int64_t now_ns) const noexcept {
  const Corrections& corrections = is_apart(size) ? table.apart : table.together;
  std::uint64_t word = corrections.cells[cell_of(size)].load(std::memory_order_relaxed);
  if (word == 0) word = corrections.all.load(std::memory_order_relaxed);
  const double us = expected_us(table, size);
  return (word == 0 ? us : us * std::exp(faded(word, milliseconds(now_ns)))) + table.arrival.us(size);
}

double RouteCost::estimate_us(const MediaSet& from, const MediaSet& to, const WriteSize& size,
                              std::int64_t now_ns) const noexcept {
  std::optional<double> most;
  const Table* last = nullptr;
  for (const Medium source : kMedia) {
    for (const Medium target : kMedia) {
      if (!from[source] || !to[target]) continue;
      const Table* const table = table_of(source, target);
      if (table == last) continue;
      last = table;
      most = std::max(most.value_or(0), estimate_us(*table, size, now_ns));
    }
  }
  return most ? *most : estimate_us(guess_, size, now_ns);
}

void RouteCost::measured(const MediaSet& from, const MediaSet& to, const WriteSize& size, double us,
                         std::int64_t now_ns) noexcept {
  Table* table = nullptr;
  for (const Medium source : kMedia) {
    for (const Medium target : kMedia) {
      if (!from[source] || !to[target]) continue;
      Table* const one = table_of(source, target);
      if (table != nullptr && table != one) return;
      table = one;
    }
  }
  if (table == nullptr) return;
  const double expected = expected_us(*table, size);
  if (!(us > 0) || !(expected > 0)) return;
  const double sample = std::log(us / expected);
  const std::uint32_t now_ms = milliseconds(now_ns);
  Corrections& corrections = is_apart(size) ? table->apart : table->together;
  correct(corrections.cells[cell_of(size)], sample, now_ms);
  correct(corrections.all, sample, now_ms);
}

void RouteCost::set_prior(Medium from, Medium to, const RoutePrior& write, const RoutePrior& arrival) {
  auto table = std::make_unique<Table>(write, arrival);
  const std::lock_guard lock(mutex_);
  measured_.push_back(std::move(table));
  tables_[from][to].store(measured_.back().get(), std::memory_order_release);
}

std::optional<RoutePrior> RouteCost::measured_prior(Medium from, Medium to) const noexcept {
  const Table* table = tables_[from][to].load(std::memory_order_acquire);
  if (table == nullptr) return std::nullopt;
  return RoutePrior{table->write.latency_us + table->arrival.latency_us,
                    table->write.us_per_piece + table->arrival.us_per_piece,
                    table->write.us_per_byte + table->arrival.us_per_byte};
}

}  // namespace kvpool
