#include "kvpool/routes/cost_fit.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <map>
#include <utility>
#include <vector>

namespace kvpool {
namespace {

constexpr std::size_t kTerms = 3;  // latency, pieces, bytes
// Faster is nothing: noise of small writes, which must not make large ones free.
constexpr double kUsPerByteMin = 1e-6;
constexpr double kSame = 1e-9;  // what sums of squares differ by rounding

using Terms = std::array<double, kTerms>;

struct Point {
  Terms terms;  // of a write that takes 1: divided by the time
};

std::vector<Point> points_of(std::span<const CostSample> samples) {
  std::map<std::pair<std::uint64_t, std::uint64_t>, std::vector<double>> by_size;
  for (const CostSample& sample : samples) {
    if (sample.us > 0 && std::isfinite(sample.us)) by_size[{sample.pieces, sample.bytes}].push_back(sample.us);
  }
  std::vector<Point> points;
  bool several_lengths = false;
  for (auto& [size, times] : by_size) {
    std::ranges::sort(times);
    const std::size_t middle = times.size() / 2;
    const double us = times.size() % 2 == 1 ? times[middle] : (times[middle - 1] + times[middle]) / 2;
    points.push_back({{1 / us, static_cast<double>(size.first) / us, static_cast<double>(size.second) / us}});
    several_lengths = several_lengths || size.second != by_size.begin()->first.second;
  }
  if (!several_lengths) points.clear();
  return points;
}

// Least squares with these terms alone, the others 0. Nothing where they do not tell the terms apart.
std::optional<Terms> solve(const std::vector<Point>& points, const Terms& scale, const std::vector<std::size_t>& used) {
  const std::size_t n = used.size();
  std::array<std::array<double, kTerms + 1>, kTerms> rows{};
  for (const Point& point : points) {
    for (std::size_t i = 0; i < n; ++i) {
      const double term = point.terms[used[i]] / scale[used[i]];
      for (std::size_t j = 0; j < n; ++j) rows[i][j] += term * point.terms[used[j]] / scale[used[j]];
      rows[i][n] += term;
    }
  }
  for (std::size_t column = 0; column < n; ++column) {
    std::size_t pivot = column;
    for (std::size_t row = column + 1; row < n; ++row) {
      if (std::abs(rows[row][column]) > std::abs(rows[pivot][column])) pivot = row;
    }
    if (std::abs(rows[pivot][column]) < kSame) return std::nullopt;
    std::swap(rows[pivot], rows[column]);
    for (std::size_t row = 0; row < n; ++row) {
      if (row == column) continue;
      const double factor = rows[row][column] / rows[column][column];
      for (std::size_t i = column; i <= n; ++i) rows[row][i] -= factor * rows[column][i];
    }
  }
  Terms terms{};
  for (std::size_t i = 0; i < n; ++i) terms[used[i]] = rows[i][n] / rows[i][i] / scale[used[i]];
  return terms;
}

double error_of(const std::vector<Point>& points, const Terms& terms) noexcept {
  double sum = 0;
  for (const Point& point : points) {
    double off = -1;
    for (std::size_t i = 0; i < kTerms; ++i) off += terms[i] * point.terms[i];
    sum += off * off;
  }
  return sum;
}

}  // namespace

std::optional<RoutePrior> fit_cost(std::span<const CostSample> samples) {
  const std::vector<Point> points = points_of(samples);
  if (points.empty()) return std::nullopt;
  Terms scale{};
  for (const Point& point : points) {
    for (std::size_t i = 0; i < kTerms; ++i) scale[i] = std::max(scale[i], point.terms[i]);
  }
  // The best without negative terms is the best of some of the terms. Where several fit alike, those that come first.
  static const std::vector<std::vector<std::size_t>> kSubsets{{0, 1, 2}, {0, 2}, {2}, {1, 2}, {0, 1}, {0}, {1}};
  std::optional<Terms> best;
  double best_error = std::numeric_limits<double>::infinity();
  for (const auto& used : kSubsets) {
    if (std::ranges::any_of(used, [&](std::size_t i) { return !(scale[i] > 0); })) continue;
    const auto terms = solve(points, scale, used);
    if (!terms || std::ranges::any_of(*terms, [](double term) { return !(term >= 0) || !std::isfinite(term); })) {
      continue;
    }
    const double error = error_of(points, *terms);
    if (!(error < best_error - kSame)) continue;
    best = terms;
    best_error = error;
  }
  if (!best) return std::nullopt;
  return RoutePrior{(*best)[0], (*best)[1], std::max((*best)[2], kUsPerByteMin)};
}

}  // namespace kvpool
