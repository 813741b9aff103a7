#include "kvpool/routes/host/copy_choice.h"

#include <doctest/doctest.h>

namespace kvpool {
namespace {

// How many of `writes` went past the caches, when the two ways cost so much a write.
int streaming_of(CopyChoice& choice, int writes, std::uint64_t bytes, double cached_us, double streaming_us) {
  int streaming = 0;
  for (int i = 0; i < writes; ++i) {
    const CopyChoice::Pick pick = choice.pick(bytes);
    streaming += pick.way == CopyWay::kStreaming ? 1 : 0;
    choice.took(pick, bytes, pick.way == CopyWay::kStreaming ? streaming_us : cached_us);
  }
  return streaming;
}

TEST_CASE("copies take the faster way, and notice when it changes") {
  CopyChoice choice;
  constexpr std::uint64_t kBytes = std::uint64_t{4} << 20;
  CHECK(streaming_of(choice, 320, kBytes, 100, 200) < 32);
  CHECK(streaming_of(choice, 640, kBytes, 200, 100) > 320);
  CHECK(streaming_of(choice, 320, kBytes, 200, 100) > 288);
  CHECK(streaming_of(choice, 640, kBytes, 100, 200) < 320);
  // Each size for itself.
  CHECK(streaming_of(choice, 320, 2 * CopyChoice::kCachedMax, 200, 100) > 280);
  CHECK(streaming_of(choice, 320, kBytes, 100, 200) < 32);
}

TEST_CASE("small copies go through the caches, and huge ones bypass them") {
  CopyChoice choice;
  CHECK(streaming_of(choice, 100, CopyChoice::kCachedMax, 200, 100) == 0);
  CHECK(streaming_of(choice, 100, CopyChoice::kStreamingMin + 1, 100, 200) == 100);
}

TEST_CASE("a single delayed copy does not change the way") {
  CopyChoice choice;
  constexpr std::uint64_t kBytes = std::uint64_t{4} << 20;
  streaming_of(choice, 100, kBytes, 100, 200);
  CopyChoice::Pick pick{CopyWay::kCached, true};
  choice.took(pick, kBytes, 1e6);
  CHECK(streaming_of(choice, 20, kBytes, 100, 200) <= 2);
}

}  // namespace
}  // namespace kvpool
