// A span of a SpanHeap: its header, and where header and objects stand. Only span_heap*.cpp include it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "kvpool/base/sanitizer.h"
#include "kvpool/base/span_heap.h"
#include "kvpool/base/span_sizes.h"

namespace kvpool {
namespace spans {

inline constexpr std::size_t kHeaderBytes = 2 * SpanSizes::kLineBytes;
inline constexpr std::size_t kHeaderRoom = 4096;  // 32 colours
inline constexpr SpanSizes kSizes(SpanHeap::kSpanBytes - kHeaderRoom);
inline constexpr std::uint32_t kLargeClass = std::numeric_limits<std::uint32_t>::max();
inline constexpr std::uint32_t kNoClass = kLargeClass - 1;  // a spare
inline constexpr std::uint64_t kMark = 0x6B76706F6F6C7370ULL;

inline std::byte* base_of(const void* memory) noexcept {
  return reinterpret_cast<std::byte*>(reinterpret_cast<std::uintptr_t>(memory) & ~(SpanHeap::kSpanBytes - 1));
}

// Where the header stands in its span: neighbouring spans have different colours.
inline std::size_t colour_of(const std::byte* base) noexcept {
  return (reinterpret_cast<std::uintptr_t>(base) / SpanHeap::kSpanBytes * kHeaderBytes) & (kHeaderRoom - 1);
}

// A free object's first word is the link to the next one. In sanitizer builds a free object is poisoned, its link too.
KVPOOL_UNCHECKED inline void* link_of(const void* object) noexcept { return *static_cast<void* const*>(object); }
KVPOOL_UNCHECKED inline void set_link(void* object, void* next) noexcept { *static_cast<void**>(object) = next; }

}  // namespace spans

// The first line is all that allocation and deallocation touch.
struct alignas(SpanSizes::kLineBytes) SpanHeap::Span {
  void* free;       // the object freed last, linked by the objects' first words
  std::byte* bump;  // objects from here on were never handed out
  SpanHeap* heap;
  Span* next_roomy;  // H2
  Span* previous_roomy;
  std::uint32_t used;  // objects
  std::uint32_t capacity;
  std::uint32_t object_bytes;
  std::uint32_t size_class;  // or kLargeClass, kNoClass
  std::uint64_t mark;

  Span* newer;
  Span* older;
  std::size_t mapped;
  bool huge_pages;

  std::byte* base() const noexcept { return spans::base_of(this); }
  std::byte* objects() const noexcept {
    return const_cast<std::byte*>(reinterpret_cast<const std::byte*>(this)) + spans::kHeaderBytes;
  }
  std::byte* end() const noexcept { return base() + mapped; }
  std::size_t touched() const noexcept { return static_cast<std::size_t>(bump - objects()); }
  bool is_large() const noexcept { return size_class == spans::kLargeClass; }
  // As far as a header and a sanitizer can tell.
  bool is_in_use(const void* memory) const noexcept {
    if (mark != spans::kMark || used == 0 || memory < objects() || memory >= bump || is_poisoned(memory)) return false;
    const auto offset = static_cast<std::size_t>(static_cast<const std::byte*>(memory) - objects());
    return is_large() ? offset == 0 : offset % object_bytes == 0;
  }
};

inline SpanHeap::Span* SpanHeap::span_of(const void* memory) noexcept {
  std::byte* base = spans::base_of(memory);
  return reinterpret_cast<Span*>(base + spans::colour_of(base));
}

}  // namespace kvpool
