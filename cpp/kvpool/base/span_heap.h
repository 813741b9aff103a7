// The heap of one radix tree: its nodes, token runs and values. A match reads a few lines out of each of many objects
// all over memory, so what it waits for is the TLB; this heap keeps the objects of one size side by side in chunks
// that the kernel can back with huge pages, which malloc does not.
//
//   span, 2 MiB at a multiple of 2 MiB
//   | unused | header | object | object | ...     | object | never touched ...                | rest |
//   0        colour                                        bump                              2 MiB
//
// An object belongs to the span that its address lies in, and a span's header knows the heap, so an object can be given
// back without naming the heap. Objects of one span are of one size class. Objects too large for a class get a
// mapping of their own, of the same form: unused, header, object. Headers stand at different offsets, by address,
// because lines that are 2 MiB apart compete for the same few places of a processor's cache; objects of 1 to 120 KiB
// are an odd number of lines for the same reason.
//
// Memory. At most an eighth of what an object takes is unused, from 256 KiB to 511 KiB at most a fifth. A span costs
// only what has been touched of it, until its class has proven to be large: the first spans of a class have small pages
// and the later ones huge pages (wants_huge_pages()). An empty span goes back to the system, but for
//   * a class's only span with room, while it has touched no more than 64 KiB, and
//   * one span, and one more for each 32 mapped, kept for whichever class needs one next.
//
// Invariants (audit() checks H1 and H2)
//   H1  An object is in use, or in its span's free list, or beyond the bump pointer.
//   H2  A span of a class is in its class's list if and only if it has room for one more object.
//   H3  The object freed last is handed out first within a span, and a span that was full is the next to be filled: it
//       is the fullest that there is. So spans with few objects become empty.
//
// A sanitizer's build knows what is in use: an object is addressable for the bytes that were asked for, from
// allocate() to deallocate().
//
// Thread-safety: none; the owner locks, also around the static calls. A span and its objects do not move, nor does the
// heap. In a child process after fork the heap and its objects are a copy like any other memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace kvpool {

class SpanHeap {
 public:
  static constexpr std::size_t kSpanBytes = std::size_t{2} << 20U;

  SpanHeap() = default;
  // Returns everything to the system; what was still in use is gone without being destroyed.
  ~SpanHeap();
  SpanHeap(const SpanHeap&) = delete;
  SpanHeap& operator=(const SpanHeap&) = delete;

  // Never null, also for 0 bytes. Aligned to 16; to 64 where the size is a multiple of 64 or more than 512 bytes.
  // The content is arbitrary. Throws std::bad_alloc and changes nothing.
  void* allocate(std::size_t bytes);

  // Null is allowed. REQUIRES: `memory` came from a heap that still exists.
  static void deallocate(void* memory) noexcept;

  // Gives back the end of an object, where it can and where that is worth it: returns `memory` or the place that the
  // first `bytes` bytes were moved to. REQUIRES: bytes is no more than was asked for.
  static void* shrink(void* memory, std::size_t bytes) noexcept;

  // What an object takes of its span. For bookkeeping: no more than was asked for may be used.
  static std::size_t usable_size(const void* memory) noexcept;

  // Address space. Much of it need not be backed by memory: a class's first object maps a whole span.
  std::size_t mapped_bytes() const noexcept { return mapped_; }
  // Memory that has been handed out at least once and is still mapped, in use or not; spans kept for reuse not counted.
  std::size_t touched_bytes() const noexcept { return touched_; }

  // Throws Error kAudit. Touches every free object.
  void audit() const;

  // For tests: is asked before every allocation, and an allocation that it refuses throws std::bad_alloc. Set it while
  // no thread allocates.
  static inline bool (*refuse_allocation)() noexcept = nullptr;

 private:
  struct Span;
  struct SizeClass {
    Span* roomy = nullptr;          // list of spans with room, the next to be filled first
    std::uint32_t spans = 0;        // with room or full
    std::uint32_t small_pages = 0;  // of these, the ones that have not been given huge pages
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
