// Parts that other implementations computed: their results and lse, in any base, order and type.
#include <doctest/doctest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include "attention_kit.h"
#include "kvpool/attention/partial.h"
#include "kvpool/base/error.h"
#include "partial_kit.h"

namespace kvpool {
namespace {

using testing::Dice;
using testing::finished;
using testing::lse_of;
using namespace testing::parts;  // NOLINT(google-build-using-namespace)

TEST_CASE("lse and results of other implementations come in any base, order and type") {
  Dice dice(9);
  const PartialShape shape{3, 4, 16};
  const PartialAttention part = made_up_part(shape, {0, 1500}, dice);
  const std::vector<float> out = finished(part, 1500);
  const TokenRange covers{0, 1500};
  for (const LseBase base : {LseBase::kTwo, LseBase::kE}) {
    for (const RowOrder order : {RowOrder::kHeadsFirst, RowOrder::kTokensFirst}) {
      for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBfloat16}) {
        std::vector<std::byte> typed(shape.values() * dtype_bytes(dtype));
        part.finish(dtype, 1500, typed);
        const std::vector<float> lse = lse_of(part, base, order);
        const PartialAttention back =
            PartialAttention::from_lse(shape, typed, dtype, lse, base, order, std::span(&covers, 1));
        CHECK(back.has_foreign());
        CHECK_FALSE(back.exact());
        const double step = dtype == DType::kFloat32 ? 0.0 : dtype == DType::kFloat16 ? 0x1p-11 : 0x1p-8;
        const std::vector<float> again = finished(back, 1500);
        for (std::size_t i = 0; i < out.size(); ++i) {
          CHECK(std::abs(double{again[i]} - double{out[i]}) <= step * std::abs(double{out[i]}));
        }
        for (std::size_t row = 0; row < lse.size(); ++row) {
          const float got = lse_of(back, base, order)[row];
          CHECK((got == lse[row] || std::abs(got - lse[row]) <= 1e-5F));
        }
      }
    }
  }
  // The order and the base are what they say.
  const std::vector<float> two = lse_of(part, LseBase::kTwo, RowOrder::kHeadsFirst);
  const std::vector<float> natural = lse_of(part, LseBase::kE, RowOrder::kTokensFirst);
  for (std::size_t head = 0; head < 4; ++head) {
    for (std::size_t token = 0; token < 3; ++token) {
      const float a = two[head * 3 + token];
      const float b = natural[token * 4 + head];
      CHECK((a == b || std::abs(a * 0.69314718F - b) <= 1e-5F));
    }
  }
}

TEST_CASE("two halves that two engines computed are as one, in whatever order they arrive") {
  // One row, one element; lse from scores that are known. Tokens 0 and 1 have the scores 1 and 3, token 2 has 2.
  const PartialShape shape{1, 1, 1};
  const double left_sum = std::exp(1.0) + std::exp(3.0);
  const std::vector<float> left_out{static_cast<float>((std::exp(1.0) * 5 + std::exp(3.0) * 7) / left_sum)};
  const std::vector<float> left_lse{static_cast<float>(std::log(left_sum))};
  const std::vector<float> right_out{11.0F};
  const std::vector<float> right_lse{static_cast<float>(2.0 / std::log(2.0))};
  const TokenRange left_covers{0, 2};
  const TokenRange right_covers{2, 3};
  const auto left = PartialAttention::from_lse(shape, std::as_bytes(std::span(left_out)), DType::kFloat32, left_lse,
                                               LseBase::kE, RowOrder::kHeadsFirst, std::span(&left_covers, 1));
  const auto right = PartialAttention::from_lse(shape, std::as_bytes(std::span(right_out)), DType::kFloat32, right_lse,
                                                LseBase::kTwo, RowOrder::kHeadsFirst, std::span(&right_covers, 1));
  const double sum = left_sum + std::exp(2.0);
  const double expected = (std::exp(1.0) * 5 + std::exp(3.0) * 7 + std::exp(2.0) * 11) / sum;
  const std::array both{left, right};
  const std::array reversed{right, left};
  CHECK(std::abs(double{finished(merged(both), 3)[0]} - expected) <= 2e-6);
  CHECK(std::abs(double{lse_of(merged(both), LseBase::kE, RowOrder::kHeadsFirst)[0]} - std::log(sum)) <= 1e-6);
  CHECK(same_bits(finished(merged(both), 3), finished(merged(reversed), 3)));
}

TEST_CASE("lse that is +inf or NaN, or does not fit, is refused") {
  const TokenRange covers{0, 5};
  std::vector<float> out(kSmall.values());
  std::vector<float> lse(kSmall.rows());
  const auto made = [&](DType dtype, std::span<const TokenRange> ranges) {
    return PartialAttention::from_lse(kSmall, std::as_bytes(std::span(out)), dtype, lse, LseBase::kE,
                                      RowOrder::kHeadsFirst, ranges);
  };
  CHECK_NOTHROW(made(DType::kFloat32, std::span(&covers, 1)));
  CHECK_THROWS_AS(made(DType::kFloat16, std::span(&covers, 1)), Error);  // half as many bytes
  CHECK_THROWS_AS(made(DType::kUint8, std::span(&covers, 1)), Error);
  CHECK_THROWS_AS(made(DType::kFloat32, {}), Error);
  const std::array overlapping{covers, TokenRange{4, 6}};
  CHECK_THROWS_AS(made(DType::kFloat32, overlapping), Error);
  lse[2] = kInfinity;
  CHECK_THROWS_AS(made(DType::kFloat32, std::span(&covers, 1)), Error);
  lse[2] = std::nanf("");
  CHECK_THROWS_AS(made(DType::kFloat32, std::span(&covers, 1)), Error);
  lse.pop_back();
  CHECK_THROWS_AS(made(DType::kFloat32, std::span(&covers, 1)), Error);
}

}  // namespace
}  // namespace kvpool
