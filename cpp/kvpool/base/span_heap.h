// The heap of one radix tree: its nodes, token runs and values. A match reads a few lines of each of many objects all
// over memory, so TLB misses dominate its time. Unlike malloc, this heap keeps the objects of one size side by side in
// chunks that the kernel can back with huge pages.
//
//   span, 2 MiB at a multiple of 2 MiB
//   | unused | header | object | object | ...     | object | never touched ...                | rest |
//   0        colour                                        bump                              2 MiB
//
// An object's address gives its span, and the span's header names the heap, so deallocate() needs no heap argument. All
// objects of a span have the same size class. An object too large for a class gets a separate mapping of the same form:
// unused, header, object. Headers have different offsets, derived from the address, because lines that are 2 MiB apart
// compete for the same few places of a processor's cache; objects of 1 to 120 KiB are an odd number of lines for the
// same reason.
//
// Memory. At most an eighth of an object's place is unused, from 256 KiB to 511 KiB at most a fifth. The first spans of
// a class have small pages, so they cost only the memory that was touched; once a class has proven to be large, further
// spans have huge pages (wants_huge_pages()). An empty span goes back to the system, except for
//   * a class's only span with room, while it has touched no more than 64 KiB, and
//   * one span, and one more for each 32 mapped, kept for the next class that needs one.
//
// Invariants (audit() checks H1 and H2)
//   H1  An object is in use, or in its span's free list, or beyond the bump pointer.
//   H2  A span of a class is in its class's list if and only if it has room for one more object.
//   H3  Within a span, the object freed last is allocated first. A span that was full becomes the next to be filled,
//       because it is the fullest. So spans with few objects become empty.
//
// Sanitizer builds track what is in use: the requested bytes of an object are addressable from allocate() to
// deallocate().
//
// Thread-safety: none; the owner locks, also around the static calls. The heap, its spans and its objects do not move.
// After fork the child has a copy of the heap and its objects, as of any other memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace kvpool {

class SpanHeap {
 public:
  static constexpr std::size_t kSpanBytes = std::size_t{2} << 20U;

  SpanHeap() = default;
  // Returns all memory to the system, without destroying objects that are still in use.
  ~SpanHeap();
  SpanHeap(const SpanHeap&) = delete;
  SpanHeap& operator=(const SpanHeap&) = delete;

  // Never null, also for 0 bytes. Aligned to 16; to 64 where the size is a multiple of 64 or more than 512 bytes.
  // The content is arbitrary. Throws std::bad_alloc and changes nothing.
  void* allocate(std::size_t bytes);

  // Null is allowed. REQUIRES: `memory` came from a heap that still exists.
  static void deallocate(void* memory) noexcept;

  // Gives back the end of an object if possible and worthwhile. Returns `memory`, or the place to which it moved the
  // first `bytes` bytes. REQUIRES: bytes is at most the requested size.
  static void* shrink(void* memory, std::size_t bytes) noexcept;

  // The bytes that an object takes in its span. For bookkeeping: only the requested bytes may be used.
  static std::size_t usable_size(const void* memory) noexcept;

  // Address space, much of which may not be backed by memory: a class's first object maps a whole span.
  std::size_t mapped_bytes() const noexcept { return mapped_; }
  // Memory that was allocated at least once and is still mapped, in use or not, without spans that are kept for reuse.
  std::size_t touched_bytes() const noexcept { return touched_; }

  // Throws Error kAudit. Touches every free object.
  void audit() const;

  // For tests: called before every allocation, which throws std::bad_alloc if this returns true. Set it while no thread
  // allocates.
  static inline bool (*refuse_allocation)() noexcept = nullptr;

 private:
  struct Span;
  struct SizeClass {
    Span* roomy = nullptr;          // list of spans with room, the next to be filled first
    std::uint32_t spans = 0;        // with room or full
    std::uint32_t small_pages = 0;  // of these, those without huge pages
  };
  static constexpr std::size_t kClassCount = 100;

  static Span* span_of(const void* memory) noexcept;
  void* try_allocate(std::size_t bytes) noexcept;
  void* try_allocate_large(std::size_t bytes) noexcept;
  static void shrink_large(Span* span, std::size_t bytes) noexcept;
  bool wants_huge_pages(const SizeClass& of) const noexcept;
  void give_huge_pages(std::size_t size_class) noexcept;
  Span* add_span(std::size_t size_class) noexcept;
  Span* map_span(std::size_t bytes, bool huge_pages) noexcept;
  void unmap_span(Span* span) noexcept;
  void on_full_or_empty(Span* span) noexcept;
  void retire(Span* span) noexcept;
  void link_roomy(Span* span) noexcept;
  void unlink_roomy(Span* span) noexcept;
  const char* fault() const noexcept;
  static const char* fault_of_objects(const Span* span) noexcept;

  std::array<SizeClass, kClassCount> classes_;
  Span* spans_ = nullptr;   // all there are, the newest first
  Span* spares_ = nullptr;  // empty spans of no class, linked by next_roomy
  std::size_t spare_count_ = 0;
  std::size_t mapped_ = 0;
  std::size_t touched_ = 0;
};

}  // namespace kvpool
