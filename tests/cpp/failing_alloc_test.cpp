// The hook that other tests rely on: without it they would silently test nothing.
#include "failing_alloc.h"

#include <doctest/doctest.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

namespace {

using kvpool::testing::fail_each_allocation;
using kvpool::testing::FailNthAllocation;

void* volatile escaped;  // keeps the compiler from leaving an allocation out

TEST_CASE("the n-th allocation fails and the others succeed") {
  void* blocks[3];
  bool failed_before = true;
  {
    const FailNthAllocation failure(2);
    blocks[0] = std::malloc(8);
    failed_before = failure.failed_one();
    blocks[1] = std::malloc(8);
    blocks[2] = std::malloc(8);
    CHECK(failure.failed_one());
  }
  CHECK_FALSE(failed_before);
  CHECK(blocks[0] != nullptr);
  CHECK(blocks[1] == nullptr);
  CHECK(blocks[2] != nullptr);
  for (void* block : blocks) std::free(block);
}

TEST_CASE("calloc and realloc fail too, and a failed realloc keeps its memory") {
  // volatile, or the compiler warns that it is used after realloc(), which fails here.
  void* const volatile memory = std::malloc(8);
  void* zeroed = nullptr;
  void* moved = nullptr;
  {
    const FailNthAllocation failure(1);
    zeroed = std::calloc(2, 8);
  }
  {
    const FailNthAllocation failure(1);
    moved = std::realloc(memory, 16);
  }
  CHECK(zeroed == nullptr);
  CHECK(moved == nullptr);
  std::free(memory);
}

TEST_CASE("every form of new fails, also inside the standard library") {
  const auto fails = [](auto&& call) {
    const FailNthAllocation failure(1);
    try {
      call();
    } catch (const std::bad_alloc&) {
      return true;
    }
    return false;
  };
  CHECK(fails([] { escaped = std::make_unique<int>(1).get(); }));
  CHECK(fails([] { escaped = std::make_unique<int[]>(10).get(); }));
  CHECK(fails([] { escaped = std::string(100, 'x').data(); }));
  CHECK(fails([] { escaped = std::vector<int>(100).data(); }));
  int something = 0;
  void* memory = &something;
  {
    const FailNthAllocation failure(1);
    memory = ::operator new(8, std::nothrow);
  }
  CHECK(memory == nullptr);
  CHECK_FALSE(fails([] { escaped = nullptr; }));
}

TEST_CASE("each allocation of a call fails once") {
  std::vector<int> allocated;  // by each attempt, before it failed
  const int threw = fail_each_allocation([&](auto&& fail) {
    std::unique_ptr<int> made[3];
    int n = 0;
    fail([&] {
      for (auto& one : made) {
        one = std::make_unique<int>(1);
        ++n;
      }
    });
    allocated.push_back(n);
  });
  CHECK(threw == 3);
  CHECK(allocated == std::vector<int>{0, 1, 2, 3});
}

}  // namespace
