// Arenas on kernels that lack a call, or have no memory to give.
#include <doctest/doctest.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <vector>

#include "arena_kit.h"
#include "child_process.h"
#include "kvpool/arena/arena.h"
#include "kvpool/arena/commit.h"
#include "kvpool/base/error.h"

namespace kvpool::testing {
namespace {

constexpr int kMadvPopulateWrite = 23;
constexpr int kMadvCollapse = 25;
constexpr int kAdviceArgument = 2;

TEST_CASE("kernels without the newer calls still commit all of the memory") {
  const std::vector<std::vector<unsigned>> unknown = {
      {kMadvCollapse}, {kMadvPopulateWrite}, {kMadvCollapse, kMadvPopulateWrite}};
  for (const std::vector<unsigned>& advices : unknown) {
    for (const HugePages huge_pages : {HugePages::kAuto, HugePages::kNever}) {
      const int status = test::run_in_child([&] {
        std::vector<test::RefusedCall> refused;
        for (const unsigned advice : advices) {
          refused.push_back({.number = SYS_madvise, .argument = kAdviceArgument, .value = advice, .error = EINVAL});
        }
        if (!test::refuse_calls(refused)) {
          return test::kChildSkipped;
        }
        ArenaOptions options = options_of(3, {kHugePageBytes + 5000});
        options.huge_pages = huge_pages;
        const auto arena = make_owned_arena(options);
        struct stat file{};
        const bool committed = fstat(arena->memfd(), &file) == 0 &&
                               static_cast<std::size_t>(file.st_blocks) * 512 >= arena->mapped_bytes();
        return committed && is_zero(*arena) && is_usable(*arena) ? 0 : 1;
      });
      CHECK((status == 0 || status == test::kChildSkipped));
    }
  }
}

TEST_CASE("required huge pages are an error where the kernel gives none") {
  const int status = test::run_in_child([] {
    if (!test::refuse_calls({{SYS_madvise, kAdviceArgument, MADV_HUGEPAGE, EINVAL},
                             {SYS_madvise, kAdviceArgument, kMadvCollapse, ENOMEM}})) {
      return test::kChildSkipped;
    }
    ArenaOptions options = options_of(40, {kHugePageBytes});
    if (make_owned_arena(options)->huge_page_bytes() != 0) {
      return test::kChildSkipped;  // a machine that gives them unasked
    }
    options.huge_pages = HugePages::kRequire;
    const Error error = error_of(options);
    return error.code() == ErrorCode::kUnsupported && field_of(error, "huge_page_bytes") == 0 ? 0 : 1;
  });
  CHECK((status == 0 || status == test::kChildSkipped));
}

TEST_CASE("running out of memory while an arena is committed is an error that leaves nothing") {
  // The kernel says ENOMEM or, where a store would have met SIGBUS, EFAULT; an old kernel says ENOSPC.
  const std::vector<std::vector<test::RefusedCall>> ways = {
      {{SYS_madvise, kAdviceArgument, kMadvPopulateWrite, ENOMEM}},
      {{SYS_madvise, kAdviceArgument, kMadvPopulateWrite, EFAULT}},
      {{SYS_madvise, kAdviceArgument, kMadvPopulateWrite, EINVAL}, {.number = SYS_fallocate, .error = ENOSPC}}};
  for (const auto& refused : ways) {
    const int status = test::run_in_child([&] {
      if (!test::refuse_calls(refused)) {
        return test::kChildSkipped;
      }
      return error_of(options_of(3, {kHugePageBytes})).code() == ErrorCode::kOutOfMemory ? 0 : 1;
    });
    CHECK((status == 0 || status == test::kChildSkipped));
  }
}

TEST_CASE("a kernel without memfd is an unsupported machine") {
  const int status = test::run_in_child([] {
    if (!test::refuse_calls({{.number = SYS_memfd_create, .error = ENOSYS}})) {
      return test::kChildSkipped;
    }
    return error_of(options_of(3, {4096})).code() == ErrorCode::kUnsupported ? 0 : 1;
  });
  CHECK((status == 0 || status == test::kChildSkipped));
}

}  // namespace
}  // namespace kvpool::testing
