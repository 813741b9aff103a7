// The objects of a span heap, and the spans that they get and leave.
#include "kvpool/base/span_heap.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>

#include "kvpool/base/check.h"
#include "kvpool/base/sanitizer.h"
#include "kvpool/base/span_header.h"

namespace kvpool {
namespace {

// See wants_huge_pages().
constexpr std::uint32_t kSpansOfLargeClass = 4;
constexpr std::size_t kBytesOfLargeHeap = std::size_t{32} << 20U;
constexpr std::size_t kTouchedToKeep = std::size_t{64} << 10U;
constexpr std::size_t kSpansPerSpare = 32;

std::size_t page_bytes() noexcept {
  static const auto bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

// `bytes` of address space at a multiple of the span size, or null. Spans one below the other share one entry in the
// kernel's list of mappings, so the place below the last one is asked for first.
std::byte* map_aligned(std::size_t bytes, std::byte* hint) noexcept {
  constexpr int kAccess = PROT_READ | PROT_WRITE;
  constexpr int kKind = MAP_PRIVATE | MAP_ANONYMOUS;
  void* exact = mmap(hint, bytes, kAccess, kKind, -1, 0);
  if (exact == MAP_FAILED) return nullptr;
  if (exact == spans::base_of(exact)) return static_cast<std::byte*>(exact);
  munmap(exact, bytes);

  const std::size_t more = bytes + SpanHeap::kSpanBytes - page_bytes();
  void* mapping = mmap(nullptr, more, kAccess, kKind, -1, 0);
  if (mapping == MAP_FAILED) return nullptr;
  auto* first = static_cast<std::byte*>(mapping);
  std::byte* aligned = spans::base_of(first + SpanHeap::kSpanBytes - 1);
  const auto before = static_cast<std::size_t>(aligned - first);
  const std::size_t after = more - before - bytes;
  if (before != 0) munmap(first, before);
  if (after != 0) munmap(aligned + bytes, after);
  return aligned;
}

// Without fail: where the kernel cannot take the addresses back (a mapping cut in two would be one too many), it takes
// the memory.
void release_mapping(std::byte* base, std::size_t bytes) noexcept {
  forget_mapping(base, bytes);
  if (munmap(base, bytes) != 0) madvise(base, bytes, MADV_DONTNEED);
}

}  // namespace

SpanHeap::~SpanHeap() {
  for (Span* span = spans_; span != nullptr;) {
    Span* const older = span->older;
    release_mapping(span->base(), span->mapped);
    span = older;
  }
}

void* SpanHeap::allocate(std::size_t bytes) {
  void* object = try_allocate(bytes);
  if (object == nullptr) throw std::bad_alloc();
  return object;
}

void* SpanHeap::try_allocate(std::size_t bytes) noexcept {
  if (refuse_allocation != nullptr && refuse_allocation()) [[unlikely]] {
    return nullptr;
  }
  if (bytes > spans::kSizes.largest()) return try_allocate_large(bytes);
  static_assert(kClassCount == SpanSizes::kCount && spans::kSizes.finds_every_class());
  const std::size_t size_class = spans::kSizes.find(bytes);
  Span* span = classes_[size_class].roomy;
  if (span == nullptr) {
    span = add_span(size_class);
    if (span == nullptr) return nullptr;
  }
  void* object = span->free;
  if (object != nullptr) {
    span->free = spans::link_of(object);
  } else {
    object = span->bump;
    span->bump += span->object_bytes;
    touched_ += span->object_bytes;
  }
  unpoison(object, std::max<std::size_t>(bytes, 1));  // so that is_in_use() tells
  if (++span->used == span->capacity) unlink_roomy(span);
  return object;
}

void SpanHeap::deallocate(void* memory) noexcept {
  if (memory == nullptr) return;
  Span* const span = span_of(memory);
  KVPOOL_DCHECK(span->is_in_use(memory));
  poison(memory, span->object_bytes);
  spans::set_link(memory, span->free);
  span->free = memory;
  const std::uint32_t used = span->used--;
  if (used == span->capacity || used == 1) span->heap->on_full_or_empty(span);
}

// `span` was full, or has become empty, or both.
void SpanHeap::on_full_or_empty(Span* span) noexcept {
  if (span->is_large()) {
    unmap_span(span);
    return;
  }
  if (span->used + 1 == span->capacity) link_roomy(span);
  if (span->used == 0) retire(span);
}

std::size_t SpanHeap::usable_size(const void* memory) noexcept {
  const Span* span = span_of(memory);
  return span->is_large() ? span->touched() : span->object_bytes;
}

void* SpanHeap::shrink(void* memory, std::size_t bytes) noexcept {
  if (memory == nullptr) return nullptr;
  Span* const span = span_of(memory);
  KVPOOL_DCHECK(span->is_in_use(memory));
  const std::size_t had = usable_size(memory);
  KVPOOL_DCHECK(bytes <= had);
  // Moving costs a copy, so a quarter has to be won: what is cut again and again is then copied no more than a few
  // times its size in all.
  if (bytes <= spans::kSizes.largest() && spans::kSizes[spans::kSizes.find(bytes)].bytes <= had / 4 * 3) {
    if (void* moved = span->heap->try_allocate(bytes)) {
      std::memcpy(moved, memory, bytes);
      deallocate(memory);
      return moved;
    }
  }
  if (span->is_large()) shrink_large(span, bytes);
  const std::size_t kept = std::max<std::size_t>(bytes, 1);
  poison(static_cast<std::byte*>(memory) + kept, usable_size(memory) - kept);
  return memory;
}

void* SpanHeap::try_allocate_large(std::size_t bytes) noexcept {
  if (bytes > std::numeric_limits<std::size_t>::max() / 4) return nullptr;
  // Whole pages, whatever the header's offset is going to be.
  const std::size_t mapped = (spans::kHeaderRoom + bytes + page_bytes() - 1) / page_bytes() * page_bytes();
  Span* span = map_span(mapped, true);
  if (span == nullptr) return nullptr;
  span->size_class = spans::kLargeClass;
  span->capacity = 1;
  span->used = 1;
  span->bump = span->end();
  touched_ += span->touched();
  poison(span->objects() + bytes, span->touched() - bytes);
  return span->objects();
}

// Unmaps the pages behind the first `bytes` bytes of the object.
void SpanHeap::shrink_large(Span* span, std::size_t bytes) noexcept {
  std::byte* const base = span->base();
  const auto needed = static_cast<std::size_t>(span->objects() - base) + bytes;
  const std::size_t mapped = (needed + page_bytes() - 1) / page_bytes() * page_bytes();
  const std::size_t surplus = span->mapped - mapped;
  if (surplus == 0 || munmap(base + mapped, surplus) != 0) return;
  forget_mapping(base, span->mapped);
  declare_mapping(base, mapped);
  span->mapped = mapped;
  span->bump = span->end();
  span->heap->mapped_ -= surplus;
  span->heap->touched_ -= surplus;
}

// With huge pages the first touch of a span costs 2 MiB. So a class gets them once it has filled four spans, or one in
// a heap that is large: they add at most a quarter to what the class has filled, or 2 MiB per class to a heap of more
// than 32 MiB.
bool SpanHeap::wants_huge_pages(const SizeClass& of) const noexcept {
  return of.spans >= kSpansOfLargeClass || (of.spans >= 1 && touched_ >= kBytesOfLargeHeap);
}

// The class's first spans, all full by now. The kernel exchanges their pages in its own time; doing that here would
// stall the caller for milliseconds.
void SpanHeap::give_huge_pages(std::size_t size_class) noexcept {
  SizeClass& of = classes_[size_class];
  for (Span* span = spans_; span != nullptr && of.small_pages > 0; span = span->older) {
    if (span->size_class != size_class || span->huge_pages) continue;
    madvise(span->base(), span->mapped, MADV_HUGEPAGE);
    span->huge_pages = true;
    --of.small_pages;
  }
}

// Called when all spans of the class are full.
SpanHeap::Span* SpanHeap::add_span(std::size_t size_class) noexcept {
  SizeClass& of = classes_[size_class];
  const bool huge_pages = wants_huge_pages(of);
  Span* span = spares_;
  if (span != nullptr) {
    spares_ = span->next_roomy;
    --spare_count_;
  } else {
    span = map_span(kSpanBytes, huge_pages);
    if (span == nullptr) return nullptr;
  }
  span->size_class = static_cast<std::uint32_t>(size_class);
  span->object_bytes = spans::kSizes[size_class].bytes;
  span->capacity = spans::kSizes[size_class].capacity;
  ++of.spans;
  if (!span->huge_pages) ++of.small_pages;
  if (huge_pages) give_huge_pages(size_class);
  link_roomy(span);
  poison(span->objects(), static_cast<std::size_t>(span->end() - span->objects()));
  return span;
}

// A mapping with a header that says: no class, no objects. Null when there is no memory.
SpanHeap::Span* SpanHeap::map_span(std::size_t bytes, bool huge_pages) noexcept {
  std::byte* const below = spans_ != nullptr && bytes == kSpanBytes ? spans_->base() - kSpanBytes : nullptr;
  std::byte* const base = map_aligned(bytes, below);
  if (base == nullptr) return nullptr;
  madvise(base, bytes, huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);  // before the header touches it
  declare_mapping(base, bytes);
  auto* span = new (base + spans::colour_of(base)) Span{};
  span->heap = this;
  span->mark = spans::kMark;
  span->size_class = spans::kNoClass;
  span->bump = span->objects();
  span->mapped = bytes;
  span->huge_pages = huge_pages;
  span->older = spans_;
  if (spans_ != nullptr) spans_->newer = span;
  spans_ = span;
  mapped_ += bytes;
  return span;
}

void SpanHeap::unmap_span(Span* span) noexcept {
  (span->newer != nullptr ? span->newer->older : spans_) = span->older;
  if (span->older != nullptr) span->older->newer = span->newer;
  mapped_ -= span->mapped;
  touched_ -= span->touched();
  release_mapping(span->base(), span->mapped);
}

// Takes an empty span out of its class, if it is not worth keeping there.
void SpanHeap::retire(Span* span) noexcept {
  SizeClass& of = classes_[span->size_class];
  const bool only_with_room = of.roomy == span && span->next_roomy == nullptr;
  if (only_with_room && !span->huge_pages && span->touched() <= kTouchedToKeep) return;
  unlink_roomy(span);
  --of.spans;
  if (!span->huge_pages) --of.small_pages;
  touched_ -= span->touched();
  span->size_class = spans::kNoClass;
  span->object_bytes = 0;
  span->capacity = 0;
  span->free = nullptr;
  span->bump = span->objects();
  span->next_roomy = spares_;
  spares_ = span;
  ++spare_count_;
  while (spare_count_ > 1 + mapped_ / kSpanBytes / kSpansPerSpare) {
    Span* const surplus = spares_;
    spares_ = surplus->next_roomy;
    --spare_count_;
    unmap_span(surplus);
  }
}

void SpanHeap::link_roomy(Span* span) noexcept {
  Span*& first = classes_[span->size_class].roomy;
  span->previous_roomy = nullptr;
  span->next_roomy = first;
  if (first != nullptr) first->previous_roomy = span;
  first = span;
}

void SpanHeap::unlink_roomy(Span* span) noexcept {
  (span->previous_roomy != nullptr ? span->previous_roomy->next_roomy : classes_[span->size_class].roomy) =
      span->next_roomy;
  if (span->next_roomy != nullptr) span->next_roomy->previous_roomy = span->previous_roomy;
}

}  // namespace kvpool
