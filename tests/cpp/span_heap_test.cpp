// The span heap, call by call.
#include "kvpool/base/span_heap.h"

#include <doctest/doctest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>
#include <new>
#include <vector>

#include "child_process.h"
#include "fuzz_seeds.h"
#include "kvpool/base/error.h"
#include "span_heap_kit.h"

namespace kvpool {
namespace {

using testing::span_heap::is_aligned;
using testing::span_heap::kKib;
using testing::span_heap::kLargestOfAClass;
using testing::span_heap::kMib;
using testing::span_heap::span_number;

TEST_CASE("at most an eighth of an object is unused, a fifth where only a few fit a span") {
  SpanHeap heap;
  for (std::size_t bytes = 1; bytes <= kLargestOfAClass; bytes += 1 + bytes / 300) {
    void* object = heap.allocate(bytes);
    const std::size_t usable = SpanHeap::usable_size(object);
    CAPTURE(bytes);
    REQUIRE(usable >= bytes);
    if (bytes <= 128) {
      REQUIRE(usable - bytes < 16);
    } else {
      REQUIRE(usable - bytes <= usable / (bytes <= 255 * kKib ? 8 : 5));
    }
    SpanHeap::deallocate(object);
  }
}

TEST_CASE("each allocation of no bytes is a separate object") {
  SpanHeap heap;
  void* first = heap.allocate(0);
  void* second = heap.allocate(0);
  CHECK(first != nullptr);
  CHECK(first != second);
  SpanHeap::deallocate(first);
  SpanHeap::deallocate(second);
  SpanHeap::deallocate(nullptr);
  heap.audit();
}

TEST_CASE("the object freed last is handed out first") {
  SpanHeap heap;
  std::vector<void*> objects;
  for (int i = 0; i < 10; ++i) objects.push_back(heap.allocate(8192));
  SpanHeap::deallocate(objects[7]);
  SpanHeap::deallocate(objects[2]);
  CHECK(heap.allocate(8192) == objects[2]);
  CHECK(heap.allocate(8192) == objects[7]);
}

TEST_CASE("a span that was full is filled before one that has few objects") {
  SpanHeap heap;
  std::vector<void*> objects{heap.allocate(8192)};
  while (span_number(objects.back()) == span_number(objects.front())) objects.push_back(heap.allocate(8192));
  void* freed = objects[5];
  SpanHeap::deallocate(freed);
  CHECK(heap.allocate(8192) == freed);
  CHECK(span_number(heap.allocate(8192)) == span_number(objects.back()));
  heap.audit();
}

TEST_CASE("a large object has a separate mapping, which is unmapped with it") {
  SpanHeap heap;
  for (const std::size_t bytes : {512 * kKib, 700 * kKib + 1, 2 * kMib, 5 * kMib + 17, 64 * kMib}) {
    CAPTURE(bytes);
    auto* object = static_cast<unsigned char*>(heap.allocate(bytes));
    CHECK(is_aligned(object, 64));
    CHECK(SpanHeap::usable_size(object) >= bytes);
    CHECK(SpanHeap::usable_size(object) <= bytes + 16 * kKib);
    CHECK(heap.mapped_bytes() >= bytes);
    CHECK(heap.mapped_bytes() <= bytes + 16 * kKib);
    CHECK(heap.touched_bytes() == SpanHeap::usable_size(object));
    object[0] = 1;
    object[bytes - 1] = 2;
    heap.audit();
    SpanHeap::deallocate(object);
    CHECK(heap.mapped_bytes() == 0);
    CHECK(heap.touched_bytes() == 0);
  }
  heap.audit();
}

TEST_CASE("shrinking a large object returns its end, and in time the whole mapping") {
  SpanHeap heap;
  auto* object = static_cast<unsigned char*>(heap.allocate(8 * kMib));
  for (std::size_t at = 0; at < 8 * kMib; at += kKib) object[at] = static_cast<unsigned char>(at / kKib % 251);

  CHECK(SpanHeap::shrink(object, 3 * kMib) == object);
  CHECK(heap.mapped_bytes() <= 3 * kMib + 16 * kKib);
  heap.audit();

  auto* moved = static_cast<unsigned char*>(SpanHeap::shrink(object, 100 * kKib));
  CHECK(moved != object);
  CHECK(heap.mapped_bytes() == SpanHeap::kSpanBytes);
  for (std::size_t at = 0; at < 100 * kKib; at += kKib) REQUIRE(moved[at] == at / kKib % 251);
  heap.audit();
  SpanHeap::deallocate(moved);
}

TEST_CASE("shrinking moves an object when that saves a quarter of it, and not before") {
  SpanHeap heap;
  void* object = heap.allocate(8192);
  CHECK(SpanHeap::shrink(object, 8192) == object);
  CHECK(SpanHeap::shrink(object, 7000) == object);
  void* moved = SpanHeap::shrink(object, 4096);
  CHECK(moved != object);
  CHECK(SpanHeap::usable_size(moved) < 4700);
  CHECK(SpanHeap::shrink(nullptr, 0) == nullptr);
  SpanHeap::deallocate(moved);
  heap.audit();
}

TEST_CASE("heaps do not share spans") {
  SpanHeap one;
  SpanHeap other;
  void* mine = one.allocate(64);
  void* yours = other.allocate(64);
  CHECK(span_number(mine) != span_number(yours));
  SpanHeap::deallocate(mine);
  SpanHeap::deallocate(yours);
  one.audit();
  other.audit();
}

TEST_CASE("a heap at the limit of its address space goes on once something is freed" *
          doctest::skip(testing::kSanitized)) {  // a sanitizer needs the address space itself
  const int status = test::run_in_child([] {
    std::size_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    const rlim_t limit = pages * static_cast<rlim_t>(sysconf(_SC_PAGESIZE)) + 64 * kMib;
    const rlimit limits{limit, limit};
    if (setrlimit(RLIMIT_AS, &limits) != 0) return test::kChildSkipped;
    SpanHeap heap;
    for (int round = 0; round < 3; ++round) {
      std::vector<void*> objects;
      objects.reserve(100000);
      try {
        for (;;) objects.push_back(heap.allocate(8192));
      } catch (const std::bad_alloc&) {
      }
      heap.audit();
      if (objects.size() < 5000) return 1;
      void* kept = SpanHeap::shrink(objects[10], 64);  // there is no span for that size
      if (kept != objects[10]) return 2;
      for (void* object : objects) SpanHeap::deallocate(object);
      heap.audit();
      SpanHeap::deallocate(heap.allocate(20 * kMib));
    }
    return 0;
  });
  CHECK((status == 0 || status == test::kChildSkipped));
}

TEST_CASE("a child process has a copy of the heap") {
  SpanHeap heap;
  auto* object = static_cast<unsigned char*>(heap.allocate(100));
  object[0] = 7;
  const int status = test::run_in_child([&] {
    if (object[0] != 7) return 1;
    object[0] = 8;
    SpanHeap::deallocate(object);
    SpanHeap::deallocate(heap.allocate(1 * kMib));
    heap.audit();
    return 0;
  });
  CHECK(status == 0);
  CHECK(object[0] == 7);
  heap.audit();
}

#if defined(__SANITIZE_ADDRESS__)
extern "C" int __asan_address_is_poisoned(void const volatile* address);

TEST_CASE("AddressSanitizer knows which bytes are in use") {
  SpanHeap heap;
  // The last one fills no page to its end, wherever in its span it begins: what follows it is the heap's.
  for (const std::size_t bytes : {120, 8192, 700 * 1024 - 64}) {
    auto* object = static_cast<unsigned char*>(heap.allocate(bytes));
    CHECK(__asan_address_is_poisoned(object + bytes - 1) == 0);
    CHECK(__asan_address_is_poisoned(object + bytes) == 1);
    CHECK(SpanHeap::shrink(object, bytes - 8) == object);
    CHECK(__asan_address_is_poisoned(object + bytes - 9) == 0);
    CHECK(__asan_address_is_poisoned(object + bytes - 8) == 1);
    if (bytes < kLargestOfAClass) {
      SpanHeap::deallocate(object);
      CHECK(__asan_address_is_poisoned(object) == 1);
    }
  }
}
#else
TEST_CASE("an audit finds a write to a freed object") {
  SpanHeap heap;
  auto* object = static_cast<std::uintptr_t*>(heap.allocate(64));
  void* other = heap.allocate(64);
  SpanHeap::deallocate(object);
  heap.audit();
  const std::uintptr_t link = *object;
  for (const std::uintptr_t wrong :
       {std::uintptr_t{12345}, reinterpret_cast<std::uintptr_t>(other) + 16, reinterpret_cast<std::uintptr_t>(other),
        reinterpret_cast<std::uintptr_t>(object)}) {
    *object = wrong;
    CHECK_THROWS_AS(heap.audit(), Error);
  }
  *object = link;
  heap.audit();
}
#endif

}  // namespace
}  // namespace kvpool
