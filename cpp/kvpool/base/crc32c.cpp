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

using CrcFunction = std::uint32_t (*)(std::uint32_t crc, const std::byte* data, std::size_t bytes) noexcept;

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
__attribute__((target("sse4.2,pclmul"))) inline std::uint32_t moved_past(std::uint64_t crc) noexcept {
  constexpr std::uint32_t kFactor = move_factor(Bytes);
  const __m128i product = _mm_clmulepi64_si128(_mm_cvtsi64_si128(static_cast<long long>(crc)),
                                               _mm_cvtsi32_si128(static_cast<int>(kFactor)), 0);
  return static_cast<std::uint32_t>(_mm_crc32_u64(0, static_cast<std::uint64_t>(_mm_cvtsi128_si64(product))));
}

template <std::size_t Lane>
__attribute__((target("sse4.2,pclmul"))) inline std::uint32_t three_lanes(std::uint32_t crc,
                                                                          const std::byte* data) noexcept {
  std::uint64_t first = crc;
  std::uint64_t second = 0;
  std::uint64_t third = 0;
  for (std::size_t at = 0; at < Lane; at += 8) {
    first = _mm_crc32_u64(first, load_u64(data + at));
    second = _mm_crc32_u64(second, load_u64(data + Lane + at));
    third = _mm_crc32_u64(third, load_u64(data + 2 * Lane + at));
  }
  return moved_past<2 * Lane>(first) ^ moved_past<Lane>(second) ^ static_cast<std::uint32_t>(third);
}

__attribute__((target("sse4.2,pclmul"))) std::uint32_t sse42_raw(std::uint32_t crc, const std::byte* data,
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

bool processor_has_crc() noexcept {
  __builtin_cpu_init();
  return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");
}

CrcFunction fastest() noexcept { return processor_has_crc() ? sse42_raw : table_raw; }

#elif defined(__aarch64__) && defined(__linux__)

__attribute__((target("+crc"))) std::uint32_t arm_raw(std::uint32_t crc, const std::byte* data,
                                                      std::size_t bytes) noexcept {
  for (; bytes >= 8; data += 8, bytes -= 8) crc = __crc32cd(crc, load_u64(data));
  for (; bytes > 0; ++data, --bytes) crc = __crc32cb(crc, static_cast<std::uint8_t>(*data));
  return crc;
}

CrcFunction fastest() noexcept { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0 ? arm_raw : table_raw; }

#else

CrcFunction fastest() noexcept { return table_raw; }

#endif

}  // namespace

std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t bytes) noexcept {
  static const CrcFunction raw = fastest();
  return ~raw(~crc, static_cast<const std::byte*>(data), bytes);
}

std::uint32_t crc32c_by_table(std::uint32_t crc, const void* data, std::size_t bytes) noexcept {
  return ~table_raw(~crc, static_cast<const std::byte*>(data), bytes);
}

}  // namespace kvpool
