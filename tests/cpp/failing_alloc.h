// Makes the n-th allocation fail, to see what a call leaves behind when memory runs out.
//
// Counted are operator new in every form but the over-aligned ones, anywhere in the program, and malloc, calloc and
// realloc as called from this project's own code (the linker's --wrap), and what a SpanHeap hands out. Works in
// sanitizer builds too.
#pragma once

#include <cstdint>
#include <new>

namespace kvpool::testing {

// While it lives, the n-th allocation of this thread fails (n == 1: the next one); those before and after it succeed.
// Not nestable.
class FailNthAllocation {
 public:
  explicit FailNthAllocation(std::uint64_t n) noexcept;
  ~FailNthAllocation();
  FailNthAllocation(const FailNthAllocation&) = delete;
  FailNthAllocation& operator=(const FailNthAllocation&) = delete;

  bool failed_one() const noexcept;  // n allocations were reached
};

// Fails the first allocation of a call, then the second of another, and so on, until a call comes to its end without
// reaching the allocation that was to fail. attempt(fail) is one such call, on fresh state: it wraps what is
// tested in fail(call), which tells whether std::bad_alloc came out. Returns how many attempts threw.
//
//   const int threw = fail_each_allocation([&](auto&& fail) {
//     Thing thing;
//     if (fail([&] { thing.grow(); })) CHECK(thing.is_as_before());
//   });
//   CHECK(threw > 0);
template <class Attempt>
int fail_each_allocation(Attempt&& attempt) {
  int threw = 0;
  bool more = true;
  for (std::uint64_t n = 1; more; ++n) {
    attempt([&](auto&& call) {
      const FailNthAllocation failure(n);
      bool thrown = false;
      try {
        call();
      } catch (const std::bad_alloc&) {
        thrown = true;
      }
      more = failure.failed_one();
      threw += thrown ? 1 : 0;
      return thrown;
    });
  }
  return threw;
}

}  // namespace kvpool::testing
