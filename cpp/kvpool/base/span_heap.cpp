#include "kvpool/base/span_heap.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <string>

#include "kvpool/base/check.h"
#include "kvpool/base/error.h"
#include "kvpool/base/sanitizer.h"
#include "kvpool/base/span_sizes.h"

namespace kvpool {
namespace {

constexpr std::size_t kLineBytes = SpanSizes::kLineBytes;
constexpr std::size_t kHeaderBytes = 2 * kLineBytes;
constexpr std::size_t kHeaderRoom = 4096;  // 32 colours
constexpr SpanSizes kSizes(SpanHeap::kSpanBytes - kHeaderRoom);
constexpr std::uint32_t kLargeClass = std::numeric_limits<std::uint32_t>::max();
constexpr std::uint32_t kNoClass = kLargeClass - 1;  // a spare
constexpr std::uint64_t kMark = 0x6B76706F6F6C7370ULL;

// See wants_huge_pages().
constexpr std::uint32_t kSpansOfLargeClass = 4;
constexpr std::size_t kBytesOfLargeHeap = std::size_t{32} << 20U;
constexpr std::size_t kTouchedToKeep = std::size_t{64} << 10U;
constexpr std::size_t kSpansPerSpare = 32;

std::size_t page_bytes() noexcept {
  static const auto bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

std::byte* base_of(const void* memory) noexcept {
  return reinterpret_cast<std::byte*>(reinterpret_cast<std::uintptr_t>(memory) & ~(SpanHeap::kSpanBytes - 1));
}

// Where the header stands in its span: neighbouring spans have different colours.
std::size_t colour_of(const std::byte* base) noexcept {
  return (reinterpret_cast<std::uintptr_t>(base) / SpanHeap::kSpanBytes * kHeaderBytes) & (kHeaderRoom - 1);
}

// A free object's first word is the link to the next one. In sanitizer builds a free object is poisoned, its link too.
KVPOOL_UNCHECKED void* link_of(const void* object) noexcept { return *static_cast<void* const*>(object); }
KVPOOL_UNCHECKED void set_link(void* object, void* next) noexcept { *static_cast<void**>(object) = next; }

// `bytes` of address space at a multiple of the span size, or null. Spans one below the other share one entry in the
// kernel's list of mappings, so the place below the last one is asked for first.
std::byte* map_aligned(std::size_t bytes, std::byte* hint) noexcept {
  constexpr int kAccess = PROT_READ | PROT_WRITE;
  constexpr int kKind = MAP_PRIVATE | MAP_ANONYMOUS;
  void* exact = mmap(hint, bytes, kAccess, kKind, -1, 0);
  if (exact == MAP_FAILED) return nullptr;
  if (exact == base_of(exact)) return static_cast<std::byte*>(exact);
  munmap(exact, bytes);

  const std::size_t more = bytes + SpanHeap::kSpanBytes - page_bytes();
  void* mapping = mmap(nullptr, more, kAccess, kKind, -1, 0);
  if (mapping == MAP_FAILED) return nullptr;
  auto* first = static_cast<std::byte*>(mapping);
  std::byte* aligned = base_of(first + SpanHeap::kSpanBytes - 1);
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

// The first line is all that allocation and deallocation touch.
struct alignas(kLineBytes) SpanHeap::Span {
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

  std::byte* base() const noexcept { return base_of(this); }
  std::byte* objects() const noexcept {
    return const_cast<std::byte*>(reinterpret_cast<const std::byte*>(this)) + kHeaderBytes;
  }
  std::byte* end() const noexcept { return base() + mapped; }
  std::size_t touched() const noexcept { return static_cast<std::size_t>(bump - objects()); }
  bool is_large() const noexcept { return size_class == kLargeClass; }
  // As far as a header and a sanitizer can tell.
  bool is_in_use(const void* memory) const noexcept {
    if (mark != kMark || used == 0 || memory < objects() || memory >= bump || is_poisoned(memory)) return false;
    const auto offset = static_cast<std::size_t>(static_cast<const std::byte*>(memory) - objects());
    return is_large() ? offset == 0 : offset % object_bytes == 0;
  }
};

SpanHeap::Span* SpanHeap::span_of(const void* memory) noexcept {
  std::byte* base = base_of(memory);
  return reinterpret_cast<Span*>(base + colour_of(base));
}

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
  if (bytes > kSizes.largest()) return try_allocate_large(bytes);
  static_assert(kClassCount == SpanSizes::kCount && kSizes.finds_every_class());
  const std::size_t size_class = kSizes.find(bytes);
  Span* span = classes_[size_class].roomy;
  if (span == nullptr) {
    span = add_span(size_class);
    if (span == nullptr) return nullptr;
  }
  void* object = span->free;
  if (object != nullptr) {
    span->free = link_of(object);
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
  set_link(memory, span->free);
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
  if (bytes <= kSizes.largest() && kSizes[kSizes.find(bytes)].bytes <= had / 4 * 3) {
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
  const std::size_t mapped = (kHeaderRoom + bytes + page_bytes() - 1) / page_bytes() * page_bytes();
  Span* span = map_span(mapped, true);
  if (span == nullptr) return nullptr;
  span->size_class = kLargeClass;
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
  span->object_bytes = kSizes[size_class].bytes;
  span->capacity = kSizes[size_class].capacity;
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
  auto* span = new (base + colour_of(base)) Span{};
  span->heap = this;
  span->mark = kMark;
  span->size_class = kNoClass;
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
  span->size_class = kNoClass;
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

void SpanHeap::audit() const {
  if (const char* found = fault()) throw Error(ErrorCode::kAudit, std::string("span heap: ") + found);
}

const char* SpanHeap::fault() const noexcept {
  std::array<SizeClass, kClassCount> seen;
  std::array<std::size_t, kClassCount> roomy{};
  std::size_t mapped = 0;
  std::size_t touched = 0;
  std::size_t spares = 0;
  const Span* newer = nullptr;
  for (const Span* span = spans_; span != nullptr; newer = span, span = span->older) {
    if (span->mark != kMark || span->heap != this || span != span_of(span)) return "a span's header is overwritten";
    if (span->newer != newer) return "the list of spans is broken";
    mapped += span->mapped;
    touched += span->touched();
    if (mapped > mapped_) return "there are more spans than were mapped";
    if (span->is_large()) {
      if (span->used != 1 || span->bump != span->end()) return "a large object's header is overwritten";
    } else if (span->size_class == kNoClass) {
      if (span->used != 0 || span->touched() != 0) return "a spare span is in use";
      ++spares;
    } else {
      if (span->size_class >= kClassCount) return "a span is of no size class";
      if (const char* found = fault_of_objects(span)) return found;
      ++seen[span->size_class].spans;
      if (!span->huge_pages) ++seen[span->size_class].small_pages;
      if (span->used < span->capacity) ++roomy[span->size_class];
    }
  }
  if (mapped != mapped_ || touched != touched_) return "the bytes mapped or touched are counted wrong";
  if (spares != spare_count_) return "the spare spans are counted wrong";
  for (const Span* span = spares_; span != nullptr; span = span->next_roomy) {
    if (spares-- == 0 || span->size_class != kNoClass) return "the list of spare spans is broken";
  }
  if (spares != 0) return "a spare span is not in the list of these";
  for (std::size_t i = 0; i < kClassCount; ++i) {
    if (seen[i].spans != classes_[i].spans || seen[i].small_pages != classes_[i].small_pages) {
      return "the spans of a class are counted wrong";
    }
    const Span* previous = nullptr;
    std::size_t left = roomy[i];
    for (const Span* span = classes_[i].roomy; span != nullptr; previous = span, span = span->next_roomy) {
      if (left-- == 0 || span->size_class != i || span->used == span->capacity || span->previous_roomy != previous) {
        return "the list of spans with room is broken";
      }
    }
    if (left != 0) return "a span with room is not in its class's list";
  }
  return nullptr;
}

// H1 for one span of a class.
const char* SpanHeap::fault_of_objects(const Span* span) noexcept {
  const std::size_t bytes = kSizes[span->size_class].bytes;
  const std::uint32_t capacity = kSizes[span->size_class].capacity;
  if (span->object_bytes != bytes || span->capacity != capacity) return "a span's size is overwritten";
  if (span->touched() % bytes != 0 || span->touched() / bytes > capacity) return "a bump pointer is off";
  const std::size_t handed_out = span->touched() / bytes;
  if (span->used > handed_out) return "more objects are in use than were handed out";
  std::size_t left = handed_out - span->used;
  for (const void* object = span->free; object != nullptr; object = link_of(object)) {
    if (left-- == 0) return "a free list is too long: an object was freed twice";
    const auto* at = static_cast<const std::byte*>(object);
    if (at < span->objects() || at >= span->bump || static_cast<std::size_t>(at - span->objects()) % bytes != 0) {
      return "a free list leads out of its span: a free object was written to";
    }
  }
  return left == 0 ? nullptr : "a free list is too short: a free object was written to";
}

}  // namespace kvpool
