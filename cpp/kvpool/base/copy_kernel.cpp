#include "kvpool/base/copy_kernel.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvpool {
namespace {

// Tiles of memcpy are long, because memcpy does better the more it is given at once.
constexpr std::size_t kPlainTileBytes = std::size_t{256} << 10;

void copy_plain(std::span<const CopyPiece> tiles) noexcept {
  for (std::size_t i = 0; i < tiles.size(); ++i) {
    if (i + 1 < tiles.size()) {
      __builtin_prefetch(tiles[i + 1].src);
    }
    if (tiles[i].bytes > 0) {
      std::memcpy(tiles[i].dst, tiles[i].src, tiles[i].bytes);
    }
  }
}

constexpr CopyKernel kPlainKernel{"memcpy", kPlainTileBytes, copy_plain};

#if defined(__x86_64__)

// Measured on Sapphire Rapids, 256 MiB of scattered pieces of 4 KiB, in GB/s: a page at a time 8.6, four at a time 9.2,
// eight 11.8, sixteen 11.4; one large memcpy 12.1. Tiles shorter than a page cost a fifth.
constexpr std::size_t kWidth = 8;
constexpr std::size_t kTileBytes = 4096;
constexpr std::size_t kAheadBytes = 512;
// Shorter pieces are not worth the set-up.
constexpr std::size_t kStreamMinBytes = 512;
constexpr std::size_t kBatchTiles = 128;

// Whole cache lines: dst is aligned to one, bytes is a multiple of one, src is anywhere.
struct Run {
  std::byte* dst;
  const std::byte* src;
  std::size_t bytes;
};

// Copies the first `bytes` of `Width` runs, `Step` bytes of each in turn. While it does, it prefetches kAheadBytes
// ahead in each run, and at the end the beginning of the run `Width` further on (`next`, or null).
// REQUIRES: bytes is a multiple of Step and of no run more than its length.
using RunsFunction = void (*)(const Run* runs, const Run* next, std::size_t bytes) noexcept;

#define KVPOOL_DEFINE_COPY_RUNS(NAME, ISA, VECTOR, LOAD, STORE)                                          \
  template <std::size_t Width, std::size_t Step>                                                         \
  __attribute__((target(ISA))) void NAME(const Run* runs, const Run* next, std::size_t bytes) noexcept { \
    const std::size_t ahead = std::min(kAheadBytes, bytes);                                              \
    for (std::size_t at = 0; at < bytes; at += Step) {                                                   \
      const bool inside = at + ahead < bytes;                                                            \
      if (inside || next != nullptr) {                                                                   \
        const Run* from = inside ? runs : next;                                                          \
        const std::size_t offset = inside ? at + ahead : at + ahead - bytes;                             \
        for (std::size_t k = 0; k < Width; ++k) {                                                        \
          for (std::size_t line = 0; line < Step; line += kCacheLineBytes) {                             \
            _mm_prefetch(reinterpret_cast<const char*>(from[k].src) + offset + line, _MM_HINT_T0);       \
          }                                                                                              \
        }                                                                                                \
      }                                                                                                  \
      for (std::size_t k = 0; k < Width; ++k) {                                                          \
        const std::byte* src = runs[k].src + at;                                                         \
        std::byte* dst = runs[k].dst + at;                                                               \
        VECTOR hold[Step / sizeof(VECTOR)];                                                              \
        _Pragma("GCC unroll 16") for (std::size_t v = 0; v < Step / sizeof(VECTOR); ++v) {               \
          hold[v] = LOAD(reinterpret_cast<const VECTOR*>(src + v * sizeof(VECTOR)));                     \
        }                                                                                                \
        _Pragma("GCC unroll 16") for (std::size_t v = 0; v < Step / sizeof(VECTOR); ++v) {               \
          STORE(reinterpret_cast<VECTOR*>(dst + v * sizeof(VECTOR)), hold[v]);                           \
        }                                                                                                \
      }                                                                                                  \
    }                                                                                                    \
  }

KVPOOL_DEFINE_COPY_RUNS(runs_avx512, "avx512f", __m512i, _mm512_loadu_si512, _mm512_stream_si512)
KVPOOL_DEFINE_COPY_RUNS(runs_avx2, "avx2", __m256i, _mm256_loadu_si256, _mm256_stream_si256)
KVPOOL_DEFINE_COPY_RUNS(runs_sse2, "sse2", __m128i, _mm_loadu_si128, _mm_stream_si128)
#undef KVPOOL_DEFINE_COPY_RUNS

// Copies a tile's ragged ends by ordinary stores and returns the whole lines between them. The ends overlap the lines:
// they write the same bytes twice. REQUIRES: tile.bytes >= 2 * kCacheLineBytes.
Run trim(const CopyPiece& tile) noexcept {
  const std::size_t head = (0 - reinterpret_cast<std::uintptr_t>(tile.dst)) % kCacheLineBytes;
  const std::size_t tail = (tile.bytes - head) % kCacheLineBytes;
  if (head > 0) {
    std::memcpy(tile.dst, tile.src, kCacheLineBytes);
  }
  if (tail > 0) {
    const std::size_t at = tile.bytes - kCacheLineBytes;
    std::memcpy(tile.dst + at, tile.src + at, kCacheLineBytes);
  }
  return Run{tile.dst + head, tile.src + head, tile.bytes - head - tail};
}

template <RunsFunction Together, RunsFunction Alone, std::size_t Step>
void copy_streaming(std::span<const CopyPiece> tiles) noexcept {
  std::array<Run, kBatchTiles> runs;
  while (!tiles.empty()) {
    const std::span<const CopyPiece> batch = tiles.first(std::min(tiles.size(), kBatchTiles));
    tiles = tiles.subspan(batch.size());
    std::size_t count = 0;
    for (std::size_t i = 0; i < batch.size(); ++i) {
      if (batch[i].bytes >= kStreamMinBytes) {
        runs[count++] = trim(batch[i]);
      } else if (batch[i].bytes > 0) {
        if (i + kWidth < batch.size()) {
          __builtin_prefetch(batch[i + kWidth].src);
        }
        std::memcpy(batch[i].dst, batch[i].src, batch[i].bytes);
      }
    }
    std::size_t first = 0;
    for (; first + kWidth <= count; first += kWidth) {
      Run* group = &runs[first];
      std::size_t common = kTileBytes;
      for (std::size_t k = 0; k < kWidth; ++k) {
        common = std::min(common, group[k].bytes);
      }
      common -= common % Step;
      Together(group, first + 2 * kWidth <= count ? group + kWidth : nullptr, common);
      for (std::size_t k = 0; k < kWidth; ++k) {
        const Run rest{group[k].dst + common, group[k].src + common, group[k].bytes - common};
        Alone(&rest, nullptr, rest.bytes);
      }
    }
    for (; first < count; ++first) {
      Alone(&runs[first], first + 1 < count ? &runs[first + 1] : nullptr, runs[first].bytes);
    }
  }
  _mm_sfence();  // non-temporal stores are not ordered by a release; everything after the fence is
}

template <RunsFunction Together, RunsFunction Alone, std::size_t Step>
constexpr CopyKernel streaming(const char* name) noexcept {
  return CopyKernel{name, kTileBytes, copy_streaming<Together, Alone, Step>};
}

// Steps as long as the registers allow: 128 bytes in SSE2's sixteen of 16 bytes, 256 bytes in the wider ones.
constexpr CopyKernel kAvx512Kernel =
    streaming<runs_avx512<kWidth, 256>, runs_avx512<1, kCacheLineBytes>, 256>("avx512");
constexpr CopyKernel kAvx2Kernel = streaming<runs_avx2<kWidth, 256>, runs_avx2<1, kCacheLineBytes>, 256>("avx2");
constexpr CopyKernel kSse2Kernel = streaming<runs_sse2<kWidth, 128>, runs_sse2<1, kCacheLineBytes>, 128>("sse2");

#endif  // __x86_64__

struct KernelList {
  std::array<CopyKernel, 4> kernels{};
  std::size_t count = 0;

  KernelList() noexcept {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) {
      kernels[count++] = kAvx512Kernel;
    }
    if (__builtin_cpu_supports("avx2")) {
      kernels[count++] = kAvx2Kernel;
    }
    kernels[count++] = kSse2Kernel;
#endif
    kernels[count++] = kPlainKernel;
  }
};

}  // namespace

std::span<const CopyKernel> copy_kernels() noexcept {
  static const KernelList list;
  return std::span(list.kernels).first(list.count);
}

}  // namespace kvpool
