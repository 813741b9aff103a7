#include "kvpool/index/read_once.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvpool {
namespace {

// Both kinds of pieces return how many tokens agree in whole pieces, or up to the first difference. `more` says whether
// what is left is to be looked at.

std::size_t agree_in_pieces(const Token* ours, const Token* theirs, std::size_t n, bool& more) noexcept {
  using Vector = Token __attribute__((vector_size(16)));
  constexpr std::size_t kVectors = 8;
  constexpr std::size_t kVectorTokens = sizeof(Vector) / sizeof(Token);
  constexpr std::size_t kStep = kVectors * kVectorTokens;
  std::size_t at = 0;
  for (; at + kStep <= n; at += kStep) {
    std::array<Vector, kVectors> differences;
    for (std::size_t i = 0; i < kVectors; ++i) {
      Vector a;
      Vector b;
      std::memcpy(&a, ours + at + i * kVectorTokens, sizeof a);
      std::memcpy(&b, theirs + at + i * kVectorTokens, sizeof b);
      differences[i] = a ^ b;
    }
    const Vector any = ((differences[0] | differences[1]) | (differences[2] | differences[3])) |
                       ((differences[4] | differences[5]) | (differences[6] | differences[7]));
    memory_barrier();
    std::array<std::uint64_t, 2> words;
    std::memcpy(words.data(), &any, sizeof words);
    if ((words[0] | words[1]) == 0) continue;
    std::array<Token, kStep> each;
    std::memcpy(each.data(), differences.data(), sizeof each);
    more = false;
    return at +
           static_cast<std::size_t>(
               std::find_if(each.begin(), each.end(), [](Token difference) { return difference != 0; }) - each.begin());
  }
  more = true;
  return at;
}

#if defined(__x86_64__)
// As fast as memcmp of the C library, which may read twice and says only that there is a difference.
__attribute__((target("avx2"))) std::size_t agree_in_wide_pieces(const Token* ours, const Token* theirs, std::size_t n,
                                                                 bool& more) noexcept {
  constexpr std::size_t kVectorTokens = sizeof(__m256i) / sizeof(Token);
  constexpr std::size_t kStep = 4 * kVectorTokens;
  std::size_t at = 0;
  for (; at + kStep <= n; at += kStep) {
    const auto* a = reinterpret_cast<const __m256i*>(ours + at);
    const auto* b = reinterpret_cast<const __m256i*>(theirs + at);
    const __m256i first = _mm256_cmpeq_epi32(_mm256_loadu_si256(a), _mm256_loadu_si256(b));
    const __m256i second = _mm256_cmpeq_epi32(_mm256_loadu_si256(a + 1), _mm256_loadu_si256(b + 1));
    const __m256i third = _mm256_cmpeq_epi32(_mm256_loadu_si256(a + 2), _mm256_loadu_si256(b + 2));
    const __m256i fourth = _mm256_cmpeq_epi32(_mm256_loadu_si256(a + 3), _mm256_loadu_si256(b + 3));
    memory_barrier();
    const __m256i all = _mm256_and_si256(_mm256_and_si256(first, second), _mm256_and_si256(third, fourth));
    if (_mm256_movemask_epi8(all) == -1) continue;
    const auto bits = [](__m256i vector) __attribute__((target("avx2"))) {
      return static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(vector)));
    };
    const std::uint32_t equal = bits(first) | bits(second) << 8U | bits(third) << 16U | bits(fourth) << 24U;
    more = false;
    return at + static_cast<std::size_t>(__builtin_ctz(~equal));
  }
  more = true;
  return at;
}

const bool kHasWideVectors = __builtin_cpu_supports("avx2") != 0;
#endif

}  // namespace

std::size_t agreement_read_once(const Token* ours, const Token* theirs, std::size_t n) noexcept {
  bool more = true;
#if defined(__x86_64__)
  std::size_t at =
      kHasWideVectors ? agree_in_wide_pieces(ours, theirs, n, more) : agree_in_pieces(ours, theirs, n, more);
#else
  std::size_t at = agree_in_pieces(ours, theirs, n, more);
#endif
  for (; more && at < n; ++at) {
    if (ours[at] != theirs[at]) return at;
    memory_barrier();
  }
  return at;
}

}  // namespace kvpool
