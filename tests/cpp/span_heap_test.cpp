#include "kvpool/base/span_heap.h"

#include <doctest/doctest.h>
#include <errno.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <limits>
#include <new>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "child_process.h"
#include "fuzz_seeds.h"
#include "kvpool/base/error.h"

namespace kvpool {
namespace {

using testing::Dice;

constexpr std::size_t kKib = 1024;
constexpr std::size_t kMib = 1024 * kKib;
constexpr std::size_t kLargestOfAClass = 511 * kKib;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

std::size_t aligned_as(std::size_t bytes) { return bytes > 512 || (bytes > 0 && bytes % 64 == 0) ? 64 : 16; }

bool is_aligned(const void* memory, std::size_t alignment) {
  return reinterpret_cast<std::uintptr_t>(memory) % alignment == 0;
}

std::uintptr_t span_number(const void* memory) {
  return reinterpret_cast<std::uintptr_t>(memory) / SpanHeap::kSpanBytes;
}

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

// A heap, and what ought to be in it: every byte of every object says whose it is.
class Model {
 public:
  ~Model() {
    for (const Object& object : objects_) SpanHeap::deallocate(object.memory);
  }

  SpanHeap& heap() { return heap_; }
  std::size_t size() const { return objects_.size(); }
  std::size_t live_bytes() const { return live_; }

  void allocate(std::size_t bytes) {
    void* memory = heap_.allocate(bytes);
    REQUIRE(memory != nullptr);
    REQUIRE(is_aligned(memory, aligned_as(bytes)));
    REQUIRE(SpanHeap::usable_size(memory) >= bytes);
    objects_.push_back(Object{static_cast<unsigned char*>(memory), bytes, next_stamp_++});
    live_ += bytes;
    stamp(objects_.back());
  }

  void free(std::size_t i) {
    verify(objects_[i]);
    SpanHeap::deallocate(objects_[i].memory);
    live_ -= objects_[i].bytes;
    objects_[i] = objects_.back();
    objects_.pop_back();
  }

  void shrink(std::size_t i, std::size_t bytes) {
    Object& object = objects_[i];
    live_ -= object.bytes - bytes;
    object.memory = static_cast<unsigned char*>(SpanHeap::shrink(object.memory, bytes));
    object.bytes = bytes;
    REQUIRE(is_aligned(object.memory, aligned_as(bytes) == 64 && bytes > 512 ? 64 : 16));
    verify(object);
  }

  std::size_t bytes_of(std::size_t i) const { return objects_[i].bytes; }

  void verify_all() const {
    for (const Object& object : objects_) verify(object);
    std::vector<std::pair<const unsigned char*, const unsigned char*>> ranges;
    for (const Object& object : objects_) {
      ranges.emplace_back(object.memory, object.memory + SpanHeap::usable_size(object.memory));
    }
    std::sort(ranges.begin(), ranges.end());
    for (std::size_t i = 1; i < ranges.size(); ++i) REQUIRE(ranges[i - 1].second <= ranges[i].first);
    heap_.audit();
  }

 private:
  struct Object {
    unsigned char* memory;
    std::size_t bytes;
    std::uint64_t stamp;
  };

  // The first and last bytes of an object, and some between them: filling all would take the test's time.
  template <class Visit>
  static void for_some_bytes(std::size_t bytes, Visit&& visit) {
    for (std::size_t at = 0; at < bytes; at += at < 64 || at + 64 >= bytes ? 1 : 61) visit(at);
    if (bytes > 0) visit(bytes - 1);
  }
  static unsigned char byte_at(std::uint64_t stamp, std::size_t at) {
    return static_cast<unsigned char>((stamp * 0x9E3779B97F4A7C15ULL + at) >> 24U);
  }
  static void stamp(const Object& object) {
    for_some_bytes(object.bytes, [&](std::size_t at) { object.memory[at] = byte_at(object.stamp, at); });
  }
  static void verify(const Object& object) {
    std::size_t wrong = 0;
    // After a shrink the sampled places differ, but for the first ones.
    for (std::size_t at = 0; at < std::min<std::size_t>(object.bytes, 64); ++at) {
      wrong += object.memory[at] != byte_at(object.stamp, at) ? 1 : 0;
    }
    for (std::size_t at = 64; at < object.bytes; at += 61) {
      wrong += object.memory[at] != byte_at(object.stamp, at) ? 1 : 0;
    }
    REQUIRE(wrong == 0);
  }

  SpanHeap heap_;
  std::vector<Object> objects_;
  std::size_t live_ = 0;
  std::uint64_t next_stamp_ = 1;
};

std::size_t random_size(Dice& dice) {
  switch (dice.below(8)) {
    case 0:
      return dice.below(64);
    case 1:
    case 2:
      return 144;
    case 3:
      return 8 * (1 + dice.below(512));
    case 4:
    case 5:
      return 64 * (1 + dice.below(256));
    case 6:
      return dice.below(100 * kKib);
    default:
      return dice.one_in(8) ? dice.below(3 * kMib) : dice.below(1200);
  }
}

TEST_CASE("objects of a span heap never overlap, keep what was written to them and lie where they may") {
  for (const std::uint64_t seed : testing::fuzz_seeds()) {
    testing::announce_fuzz("span heap", seed);
    Dice dice(seed);
    Model model;
    std::size_t target = 500;
    for (int step = 0; step < testing::fuzz_length(20000); ++step) {
      if (step % 2000 == 0) target = dice.below(1500);
      const bool grow = model.size() == 0 || dice.below(model.size() + target) < target;
      if (grow) {
        model.allocate(random_size(dice));
      } else if (const std::size_t i = dice.below(model.size()); dice.one_in(4) && model.bytes_of(i) > 0) {
        model.shrink(i, dice.below(model.bytes_of(i) + 1));
      } else {
        model.free(i);
      }
      if (step % 50 == 0) model.heap().audit();
      if (step % 1000 == 0) model.verify_all();
    }
    model.verify_all();
    while (model.size() > 0) model.free(dice.below(model.size()));
    model.verify_all();
  }
}

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

TEST_CASE("a heap that has become empty has returned all but a spare span") {
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

TEST_CASE("an object that comes and goes does not map and unmap its span") {
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
  // Per class a page at either end. The classes whose ten objects fill spans have them full.
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

TEST_CASE("an allocation that nothing can satisfy throws and leaves the heap as it was") {
  Model model;
  for (int i = 0; i < 100; ++i) model.allocate(1000);
  const std::size_t mapped = model.heap().mapped_bytes();
  for (const std::size_t bytes :
       {std::numeric_limits<std::size_t>::max(), std::numeric_limits<std::size_t>::max() / 5, std::size_t{1} << 60U}) {
    CHECK_THROWS_AS(static_cast<void>(model.heap().allocate(bytes)), std::bad_alloc);
  }
  CHECK(model.heap().mapped_bytes() == mapped);
  model.verify_all();
  model.allocate(1000);
}

TEST_CASE("a heap at the limit of its address space goes on once something is freed" *
          doctest::skip(kSanitized)) {  // a sanitizer needs the address space itself
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

int allocations_left = 0;
bool refuse_at_zero() noexcept { return allocations_left-- == 0; }

TEST_CASE("an allocation that a test refuses throws, and a shrink keeps the object where it is") {
  Model model;
  bool (*const before)() noexcept = SpanHeap::refuse_allocation;
  allocations_left = 3;
  SpanHeap::refuse_allocation = refuse_at_zero;
  for (int i = 0; i < 3; ++i) model.allocate(4096);
  CHECK_THROWS_AS(static_cast<void>(model.heap().allocate(4096)), std::bad_alloc);
  allocations_left = 0;
  model.shrink(1, 64);
  SpanHeap::refuse_allocation = before;
  CHECK(model.size() == 3);
  model.verify_all();
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
