// The memory that a span heap takes and returns.
#include <doctest/doctest.h>
#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "kvpool/base/span_heap.h"
#include "span_heap_kit.h"

namespace kvpool {
namespace {

using testing::span_heap::kMib;
using testing::span_heap::span_number;

// Bytes of memory behind the spans that these objects lie in.
std::size_t resident_bytes(const std::vector<void*>& objects) {
  std::set<std::uintptr_t> spans;
  for (const void* object : objects) spans.insert(span_number(object));
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> present(SpanHeap::kSpanBytes / page);
  std::size_t bytes = 0;
  for (const std::uintptr_t span : spans) {
    REQUIRE(mincore(reinterpret_cast<void*>(span * SpanHeap::kSpanBytes), SpanHeap::kSpanBytes, present.data()) == 0);
    for (const unsigned char flags : present) bytes += (flags & 1U) != 0 ? page : 0;
  }
  return bytes;
}

// Whether the kernel was told to back this object with huge pages: "hg" in the flags of its mapping. False too where
// the kernel does not tell.
bool has_huge_pages(const void* object) {
  std::ifstream smaps("/proc/self/smaps");
  bool within = false;
  for (std::string line; std::getline(smaps, line);) {
    std::uintptr_t first = 0;
    std::uintptr_t end = 0;
    char dash = 0;
    std::istringstream fields(line);
    if (fields >> std::hex >> first >> dash >> end && dash == '-') {
      const auto at = reinterpret_cast<std::uintptr_t>(object);
      within = first <= at && at < end;
    } else if (within && line.rfind("VmFlags:", 0) == 0) {
      return line.find(" hg") != std::string::npos;
    }
  }
  return false;
}

bool kernel_tells_of_huge_pages() {
  void* page = mmap(nullptr, SpanHeap::kSpanBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  REQUIRE(page != MAP_FAILED);
  const bool told = madvise(page, SpanHeap::kSpanBytes, MADV_HUGEPAGE) == 0 && has_huge_pages(page);
  munmap(page, SpanHeap::kSpanBytes);
  return told;
}

TEST_CASE("an empty heap has returned all of its spans but a spare one") {
  SpanHeap heap;
  std::vector<void*> objects;
  for (int i = 0; i < 20000; ++i) objects.push_back(heap.allocate(i % 2 == 0 ? 4096 : 144));
  const std::size_t full = heap.mapped_bytes();
  CHECK(full >= 10000 * (4096 + 144));
  CHECK(heap.touched_bytes() <= full);

  // Every other object of the older half: spans stay. Then the older half: its spans go.
  for (std::size_t i = 0; i < 10000; i += 4) SpanHeap::deallocate(std::exchange(objects[i], nullptr));
  heap.audit();
  CHECK(heap.mapped_bytes() == full);
  for (std::size_t i = 0; i < 10000; ++i) SpanHeap::deallocate(std::exchange(objects[i], nullptr));
  heap.audit();
  CHECK(heap.mapped_bytes() < full * 7 / 10);
  for (void*& object : objects) SpanHeap::deallocate(std::exchange(object, nullptr));
  heap.audit();
  CHECK(heap.mapped_bytes() <= SpanHeap::kSpanBytes);
  CHECK(heap.touched_bytes() == 0);
}

TEST_CASE("allocating and freeing one object repeatedly does not map and unmap its span") {
  SpanHeap heap;
  void* const first = heap.allocate(1000);
  SpanHeap::deallocate(first);
  void* const other_class = heap.allocate(64);
  SpanHeap::deallocate(other_class);
  for (int i = 0; i < 100; ++i) {
    void* again = heap.allocate(1000);
    void* another = heap.allocate(64);
    CHECK(again == first);
    CHECK(another == other_class);
    SpanHeap::deallocate(again);
    SpanHeap::deallocate(another);
  }
  CHECK(heap.mapped_bytes() == 2 * SpanHeap::kSpanBytes);
}

TEST_CASE("an empty span serves another size") {
  SpanHeap heap;
  std::vector<void*> objects;
  for (int i = 0; i < 100; ++i) objects.push_back(heap.allocate(8192));
  for (void* object : objects) SpanHeap::deallocate(object);
  CHECK(heap.mapped_bytes() == SpanHeap::kSpanBytes);
  void* object = heap.allocate(144);
  CHECK(heap.mapped_bytes() == SpanHeap::kSpanBytes);
  std::memset(object, 1, 144);
  heap.audit();
}

TEST_CASE("a heap of a few objects of many sizes takes little memory") {
  SpanHeap heap;
  std::vector<void*> objects;
  std::size_t bytes = 0;
  for (std::size_t size = 32, i = 0; i < 20; ++i, size += size / 2) {
    for (int n = 0; n < 10; ++n) {
      objects.push_back(heap.allocate(size));
      std::memset(objects.back(), 1, size);
      bytes += SpanHeap::usable_size(objects.back());
    }
  }
  CHECK(heap.touched_bytes() == bytes);
  // Per class a page at either end. Classes in which ten objects fill spans have full spans.
  CHECK(resident_bytes(objects) <= bytes + 20 * 4 * static_cast<std::size_t>(sysconf(_SC_PAGESIZE)));
}

TEST_CASE("a class gets huge pages when it has filled four spans, or one in a large heap") {
  if (!kernel_tells_of_huge_pages()) return;
  SpanHeap heap;
  void* const early = heap.allocate(8192);
  std::vector<void*> firsts{early};  // of each span
  while (firsts.size() < 5) {
    void* object = heap.allocate(8192);
    if (span_number(object) != span_number(firsts.back())) firsts.push_back(object);
    if (firsts.size() == 4 && object == firsts.back()) CHECK(!has_huge_pages(object));
  }
  CHECK(has_huge_pages(firsts[4]));
  CHECK(has_huge_pages(early));  // it is in use for good, it seems
  heap.audit();

  while (heap.touched_bytes() < 33 * kMib) static_cast<void>(heap.allocate(8192));
  void* const other = heap.allocate(4096);
  CHECK(!has_huge_pages(other));
  void* next = other;
  while (span_number(next) == span_number(other)) next = heap.allocate(4096);
  CHECK(has_huge_pages(next));
  CHECK(has_huge_pages(other));
  heap.audit();
}

TEST_CASE("the destructor returns the memory of objects that are in use") {
  void* object = nullptr;
  void* large = nullptr;
  {
    SpanHeap heap;
    for (int i = 0; i < 1000; ++i) object = heap.allocate(static_cast<std::size_t>(i) * 16);
    large = heap.allocate(3 * kMib);
    std::memset(large, 1, 3 * kMib);
  }
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  for (const void* gone : {object, large}) {
    unsigned char present = 0;
    void* at = reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(gone) / page * page);
    CHECK(mincore(at, page, &present) == -1);
    CHECK(errno == ENOMEM);  // not mapped
  }
}

}  // namespace
}  // namespace kvpool
