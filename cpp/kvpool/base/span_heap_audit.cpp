// Checks the invariants of a SpanHeap.
#include <array>
#include <string>

#include "kvpool/base/error.h"
#include "kvpool/base/span_header.h"

namespace kvpool {

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
    if (span->mark != spans::kMark || span->heap != this || span != span_of(span))
      return "a span's header is overwritten";
    if (span->newer != newer) return "the list of spans is broken";
    mapped += span->mapped;
    touched += span->touched();
    if (mapped > mapped_) return "there are more spans than were mapped";
    if (span->is_large()) {
      if (span->used != 1 || span->bump != span->end()) return "a large object's header is overwritten";
    } else if (span->size_class == spans::kNoClass) {
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
    if (spares-- == 0 || span->size_class != spans::kNoClass) return "the list of spare spans is broken";
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
  const std::size_t bytes = spans::kSizes[span->size_class].bytes;
  const std::uint32_t capacity = spans::kSizes[span->size_class].capacity;
  if (span->object_bytes != bytes || span->capacity != capacity) return "a span's size is overwritten";
  if (span->touched() % bytes != 0 || span->touched() / bytes > capacity) return "a bump pointer is off";
  const std::size_t handed_out = span->touched() / bytes;
  if (span->used > handed_out) return "more objects are in use than were handed out";
  std::size_t left = handed_out - span->used;
  for (const void* object = span->free; object != nullptr; object = spans::link_of(object)) {
    if (left-- == 0) return "a free list is too long: an object was freed twice";
    const auto* at = static_cast<const std::byte*>(object);
    if (at < span->objects() || at >= span->bump || static_cast<std::size_t>(at - span->objects()) % bytes != 0) {
      return "a free list leads out of its span: a free object was written to";
    }
  }
  return left == 0 ? nullptr : "a free list is too short: a free object was written to";
}

}  // namespace kvpool
