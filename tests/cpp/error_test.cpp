// Errors are values: threads share copies of one, and ThreadSanitizer reports nothing, without any suppression.
#include "kvpool/base/error.h"

#include <doctest/doctest.h>

#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace kvpool {
namespace {

static_assert(std::is_nothrow_copy_constructible_v<Error> && std::is_nothrow_copy_assignable_v<Error>);

const char* const kText =
    "the blocks are gone, all of them, and the peer that had them";  // longer than a string holds inline

TEST_CASE("error: a copy keeps its text when the original is destroyed or moved from") {
  std::optional<Error> first(std::in_place, ErrorCode::kState, kText, std::initializer_list<ErrorField>{{"block", 7}});
  const Error copy = *first;
  const Error moved = std::move(*first);
  CHECK(std::string(first->what()) == kText);  // NOLINT(bugprone-use-after-move): an error never says nothing
  first.reset();
  for (const Error& error : {copy, moved}) {
    CHECK(error.code() == ErrorCode::kState);
    CHECK(std::string(error.what()) == kText);
    CHECK(error.fields() == std::vector<ErrorField>{{"block", 7}});
  }
}

TEST_CASE("error: a field that is added to one copy does not appear in the others") {
  const Error first(ErrorCode::kOutOfMemory, kText, {{"requested_bytes", 8}});
  Error copy = first;
  copy.add("total_bytes", 4);
  CHECK(first.fields() == std::vector<ErrorField>{{"requested_bytes", 8}});
  CHECK(copy.fields() == std::vector<ErrorField>{{"requested_bytes", 8}, {"total_bytes", 4}});
  CHECK(std::string(copy.what()) == kText);
}

TEST_CASE("error: threads read and destroy copies of one error, and the last one frees it") {
  constexpr int kThreads = 4;
  for (int round = 0; round < 100; ++round) {
    std::optional<Error> first(std::in_place, ErrorCode::kPeerLost, kText);
    std::vector<std::thread> threads;
    threads.reserve(kThreads);
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([copy = std::make_optional(*first)]() mutable {
        const std::string read = copy->what();
        copy.reset();
        CHECK(read == kText);
      });
    }
    first.reset();
    for (std::thread& thread : threads) thread.join();
  }
}

}  // namespace
}  // namespace kvpool
