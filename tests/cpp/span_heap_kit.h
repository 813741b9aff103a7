// Helpers of the span heap's tests.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvpool/base/span_heap.h"

namespace kvpool::testing::span_heap {

inline constexpr std::size_t kKib = 1024;
inline constexpr std::size_t kMib = 1024 * kKib;
inline constexpr std::size_t kLargestOfAClass = 511 * kKib;

inline bool is_aligned(const void* memory, std::size_t alignment) {
  return reinterpret_cast<std::uintptr_t>(memory) % alignment == 0;
}

// Objects with the same number lie in one span.
inline std::uintptr_t span_number(const void* memory) {
  return reinterpret_cast<std::uintptr_t>(memory) / SpanHeap::kSpanBytes;
}

}  // namespace kvpool::testing::span_heap
