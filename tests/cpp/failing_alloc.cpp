#include "failing_alloc.h"

#include <cstddef>
#include <cstdlib>

#include "kvpool/base/span_heap.h"

// The linker points every call of malloc in this program's own objects to __wrap_malloc, and __real_malloc to malloc.
// NOLINTBEGIN(bugprone-reserved-identifier): the linker's names
extern "C" {
void* __real_malloc(std::size_t bytes);
void* __real_calloc(std::size_t n, std::size_t bytes);
void* __real_realloc(void* memory, std::size_t bytes);
void* __wrap_malloc(std::size_t bytes);
void* __wrap_calloc(std::size_t n, std::size_t bytes);
void* __wrap_realloc(void* memory, std::size_t bytes);
}
// NOLINTEND(bugprone-reserved-identifier)

namespace {

// Volatile, because the compiler knows that malloc does not change a program's variables.
thread_local volatile std::uint64_t allocations_left = 0;  // until one fails; 0: none will
thread_local volatile bool reached = false;

bool fails_now() noexcept {
  const std::uint64_t left = allocations_left;
  if (left == 0) return false;
  allocations_left = left - 1;
  if (left == 1) reached = true;
  return left == 1;
}

// Allocations from the heap of a tree count like the others, where the heap can be asked to refuse.
[[maybe_unused]] const bool hooked = (kvpool::SpanHeap::refuse_allocation = &fails_now, true);

void* allocate(std::size_t bytes) noexcept { return fails_now() ? nullptr : __real_malloc(bytes == 0 ? 1 : bytes); }

void* allocate_or_throw(std::size_t bytes) {
  void* memory = allocate(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

extern "C" {
void* __wrap_malloc(std::size_t bytes) { return fails_now() ? nullptr : __real_malloc(bytes); }
void* __wrap_calloc(std::size_t n, std::size_t bytes) { return fails_now() ? nullptr : __real_calloc(n, bytes); }
void* __wrap_realloc(void* memory, std::size_t bytes) { return fails_now() ? nullptr : __real_realloc(memory, bytes); }
}

// All forms that may meet in one allocation and its release, so that none of them is a sanitizer's own.
void* operator new(std::size_t bytes) { return allocate_or_throw(bytes); }
void* operator new[](std::size_t bytes) { return allocate_or_throw(bytes); }
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return allocate(bytes); }
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept { return allocate(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
void operator delete[](void* memory, const std::nothrow_t&) noexcept { std::free(memory); }

namespace kvpool::testing {

FailNthAllocation::FailNthAllocation(std::uint64_t n) noexcept {
  reached = false;
  allocations_left = n;
}

FailNthAllocation::~FailNthAllocation() { allocations_left = 0; }

bool FailNthAllocation::failed_one() const noexcept { return reached; }

}  // namespace kvpool::testing
