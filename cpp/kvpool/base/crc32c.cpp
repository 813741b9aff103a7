#include <array>
#include <cstring>

#include "kvpool/base/digest.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

// All functions below with a name in `_raw` work on the register, without the inversions before and after.
namespace kvpool {
namespace {

constexpr std::uint32_t kPolynomial = 0x82F63B78;  // bit-reflected: bit 31 is x^0

template <std::uint32_t (*Raw)(std::uint32_t crc, const std::byte* data, std::size_t bytes) noexcept>
std::uint32_t appended(std::uint32_t crc, const void* data, std::size_t bytes) noexcept {
  return ~Raw(~crc, static_cast<const std::byte*>(data), bytes);
}

std::uint64_t load_u64(const std::byte* data) noexcept {
  std::uint64_t value;
  std::memcpy(&value, data, sizeof(value));
  return value;
}

// ---- any processor: eight bytes a step, one table for each

using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

constexpr Tables make_tables() noexcept {
  Tables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    tables[0][byte] = crc;
  }
  for (std::size_t ahead = 1; ahead < tables.size(); ++ahead) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = tables[ahead - 1][byte];
      tables[ahead][byte] = (before >> 8) ^ tables[0][before & 0xFF];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

std::uint32_t table_raw(std::uint32_t crc, const std::byte* data, std::size_t bytes) noexcept {
  for (; bytes >= 8; data += 8, bytes -= 8) {
    const std::uint64_t word = load_u64(data) ^ crc;
    crc = 0;
    for (unsigned i = 0; i < 8; ++i) crc ^= kTables[7 - i][(word >> (8 * i)) & 0xFF];
  }
  for (; bytes > 0; ++data, --bytes) crc = (crc >> 8) ^ kTables[0][(crc ^ static_cast<std::uint8_t>(*data)) & 0xFF];
  return crc;
}

#if defined(__x86_64__)

// ---- SSE4.2: the instruction takes eight bytes a cycle but answers after three, so three lanes run side by side. The
// register of a lane is then moved past the bytes of the lanes behind it: multiplied by x^(8 * bytes).

#if defined(__clang__)
#define KVPOOL_CRC32 "sse4.2,crc32,pclmul"  // two sets of instructions for clang; GCC before 11 knows no "crc32"
#else
#define KVPOOL_CRC32 "sse4.2,pclmul"
#endif

// x^exponent modulo the polynomial.
constexpr std::uint32_t power_of_x(std::uint64_t exponent) noexcept {
  std::uint32_t power = 0x80000000;
  for (; exponent > 0; --exponent) power = (power >> 1) ^ ((power & 1) != 0 ? kPolynomial : 0);
  return power;
}

// The factor that moves a register past `bytes`. The crc32 instruction below multiplies by another x^32, and the
// reflected product of two 32-bit numbers stands one bit lower than a 64-bit number should.
constexpr std::uint32_t move_factor(std::uint64_t bytes) noexcept { return power_of_x(8 * bytes - 33); }

template <std::uint64_t Bytes>
__attribute__((target(KVPOOL_CRC32))) inline std::uint32_t moved_past(std::uint64_t crc) noexcept {
  constexpr std::uint32_t kFactor = move_factor(Bytes);
  const __m128i product = _mm_clmulepi64_si128(_mm_cvtsi64_si128(static_cast<long long>(crc)),
                                               _mm_cvtsi32_si128(static_cast<int>(kFactor)), 0);
  return static_cast<std::uint32_t>(_mm_crc32_u64(0, static_cast<std::uint64_t>(_mm_cvtsi128_si64(product))));
}

template <std::size_t RankChannel>
__attribute__((target(KVPOOL_CRC32))) inline std::uint32_t three_lanes(std::uint32_t crc,
                                                                       const std::byte* data) noexcept {
  std::uint64_t first = crc;
  std::uint64_t second = 0;
  std::uint64_t third = 0;
  for (std::size_t at = 0; at < RankChannel; at += 8) {
    first = _mm_crc32_u64(first, load_u64(data + at));
    second = _mm_crc32_u64(second, load_u64(data + RankChannel + at));
    third = _mm_crc32_u64(third, load_u64(data + 2 * RankChannel + at));
  }
  return moved_past<2 * RankChannel>(first) ^ moved_past<RankChannel>(second) ^ static_cast<std::uint32_t>(third);
}

__attribute__((target(KVPOOL_CRC32))) std::uint32_t sse42_raw(std::uint32_t crc, const std::byte* data,
                                                              std::size_t bytes) noexcept {
  constexpr std::size_t kLongLane = 2048;
  constexpr std::size_t kShortLane = 128;
  for (; bytes >= 3 * kLongLane; data += 3 * kLongLane, bytes -= 3 * kLongLane) crc = three_lanes<kLongLane>(crc, data);
  for (; bytes >= 3 * kShortLane; data += 3 * kShortLane, bytes -= 3 * kShortLane) {
    crc = three_lanes<kShortLane>(crc, data);
  }
  std::uint64_t wide = crc;
  for (; bytes >= 8; data += 8, bytes -= 8) wide = _mm_crc32_u64(wide, load_u64(data));
  crc = static_cast<std::uint32_t>(wide);
  for (; bytes > 0; ++data, --bytes) crc = _mm_crc32_u8(crc, static_cast<std::uint8_t>(*data));
  return crc;
}

// ---- AVX-512: a product without carries takes 64 bytes at a time, which no crc32 instruction does. Four registers are
// each multiplied past the 256 bytes that they cover together, and what stands there is added. At the end they are
// folded into one, that one into 16 bytes, and those into the register of the crc32 instruction.

constexpr std::uint64_t kFoldBytes = 256;

// What the two halves of 16 bytes are multiplied by to move them past `bytes`. The reflected product of two 64-bit
// numbers stands one bit lower than it should.
constexpr std::uint64_t fold_low(std::uint64_t bytes) noexcept {
  return std::uint64_t{power_of_x(8 * bytes + 32)} << 1;
}
constexpr std::uint64_t fold_high(std::uint64_t bytes) noexcept {
  return std::uint64_t{power_of_x(8 * bytes - 32)} << 1;
}

#define KVPOOL_WIDE __attribute__((target("avx512f,vpclmulqdq," KVPOOL_CRC32)))

template <std::uint64_t Bytes>
KVPOOL_WIDE inline __m512i folded(__m512i value, __m512i onto) noexcept {
  constexpr auto kLow = static_cast<long long>(fold_low(Bytes));
  constexpr auto kHigh = static_cast<long long>(fold_high(Bytes));
  const __m512i factors = _mm512_set_epi64(kHigh, kLow, kHigh, kLow, kHigh, kLow, kHigh, kLow);
  const __m512i low = _mm512_clmulepi64_epi128(value, factors, 0x00);
  const __m512i high = _mm512_clmulepi64_epi128(value, factors, 0x11);
  return _mm512_ternarylogic_epi64(low, high, onto, 0x96);  // the sum of the three
}

template <std::uint64_t Bytes>
KVPOOL_WIDE inline __m128i folded(__m128i value, __m128i onto) noexcept {
  constexpr auto kLow = static_cast<long long>(fold_low(Bytes));
  constexpr auto kHigh = static_cast<long long>(fold_high(Bytes));
  const __m128i factors = _mm_set_epi64x(kHigh, kLow);
  const __m128i low = _mm_clmulepi64_si128(value, factors, 0x00);
  const __m128i high = _mm_clmulepi64_si128(value, factors, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), onto);
}

// Masked by all ones, because GCC 12 takes the plain form to read something uninitialized.
template <int Index>
KVPOOL_WIDE inline __m128i quarter(__m512i value) noexcept {
  return _mm512_maskz_extracti32x4_epi32(0xF, value, Index);
}

KVPOOL_WIDE std::uint32_t avx512_raw(std::uint32_t crc, const std::byte* data, std::size_t bytes) noexcept {
  if (bytes < 2 * kFoldBytes) return sse42_raw(crc, data, bytes);
  // The register counts as a part of the first four bytes.
  const __m512i before = _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(crc)));
  __m512i a = _mm512_xor_si512(_mm512_loadu_si512(data), before);
  __m512i b = _mm512_loadu_si512(data + 64);
  __m512i c = _mm512_loadu_si512(data + 128);
  __m512i d = _mm512_loadu_si512(data + 192);
  for (data += kFoldBytes, bytes -= kFoldBytes; bytes >= kFoldBytes; data += kFoldBytes, bytes -= kFoldBytes) {
    a = folded<kFoldBytes>(a, _mm512_loadu_si512(data));
    b = folded<kFoldBytes>(b, _mm512_loadu_si512(data + 64));
    c = folded<kFoldBytes>(c, _mm512_loadu_si512(data + 128));
    d = folded<kFoldBytes>(d, _mm512_loadu_si512(data + 192));
  }
  d = folded<64>(folded<64>(folded<64>(a, b), c), d);
  __m128i last = quarter<0>(d);
  last = folded<16>(last, quarter<1>(d));
  last = folded<16>(last, quarter<2>(d));
  last = folded<16>(last, quarter<3>(d));
  std::uint64_t wide = _mm_crc32_u64(0, static_cast<std::uint64_t>(_mm_cvtsi128_si64(last)));
  wide = _mm_crc32_u64(wide, static_cast<std::uint64_t>(_mm_cvtsi128_si64(_mm_unpackhi_epi64(last, last))));
  return sse42_raw(static_cast<std::uint32_t>(wide), data, bytes);
}

#undef KVPOOL_WIDE

std::span<const CrcWay> ways_here() noexcept {
  static constexpr CrcWay kWays[] = {
      {"avx512", appended<avx512_raw>}, {"sse4.2", appended<sse42_raw>}, {"table", appended<table_raw>}};
  const std::span<const CrcWay> ways(kWays);
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("sse4.2") || !__builtin_cpu_supports("pclmul")) return ways.last(1);
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("vpclmulqdq")) return ways.last(2);
  return ways;
}

#elif defined(__aarch64__) && defined(__linux__)

__attribute__((target("+crc"))) std::uint32_t arm_raw(std::uint32_t crc, const std::byte* data,
                                                      std::size_t bytes) noexcept {
  for (; bytes >= 8; data += 8, bytes -= 8) crc = __crc32cd(crc, load_u64(data));
  for (; bytes > 0; ++data, --bytes) crc = __crc32cb(crc, static_cast<std::uint8_t>(*data));
  return crc;
}

std::span<const CrcWay> ways_here() noexcept {
  static constexpr CrcWay kWays[] = {{"armv8", appended<arm_raw>}, {"table", appended<table_raw>}};
  return std::span(kWays).last((getauxval(AT_HWCAP) & HWCAP_CRC32) != 0 ? 2 : 1);
}

#else

std::span<const CrcWay> ways_here() noexcept {
  static constexpr CrcWay kWays[] = {{"table", appended<table_raw>}};
  return kWays;
}

#endif

}  // namespace

std::span<const CrcWay> crc32c_ways() noexcept {
  static const std::span<const CrcWay> ways = ways_here();
  return ways;
}

std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t bytes) noexcept {
  return crc32c_ways().front().append(crc, data, bytes);
}

}  // namespace kvpool
