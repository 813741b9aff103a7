// The span heap beside a model that knows every byte of every object.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <new>
#include <utility>
#include <vector>

#include "fuzz_seeds.h"
#include "kvpool/base/span_heap.h"
#include "span_heap_kit.h"

namespace kvpool {
namespace {

using testing::span_heap::is_aligned;
using testing::span_heap::kKib;
using testing::span_heap::kMib;

using testing::Dice;

std::size_t aligned_as(std::size_t bytes) { return bytes > 512 || (bytes > 0 && bytes % 64 == 0) ? 64 : 16; }

// A heap, and what ought to be in it: every byte of an object names its owner.
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

int allocations_left = 0;
bool refuse_at_zero() noexcept { return allocations_left-- == 0; }

TEST_CASE("an allocation that a test makes fail throws, and a failed shrink keeps the object where it is") {
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

}  // namespace
}  // namespace kvpool
