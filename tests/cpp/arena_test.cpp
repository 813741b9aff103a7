#include "kvpool/arena/arena.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "arena_kit.h"
#include "child_process.h"
#include "kvpool/arena/commit.h"
#include "kvpool/base/address.h"
#include "kvpool/base/error.h"

namespace kvpool::testing {
namespace {

TEST_CASE("an owned arena is one mapping, segment after segment, without gaps") {
  const auto arena = make_owned_arena(options_of(7, {4096, 100, 5000}));
  CHECK(arena->medium() == Medium::kDram);
  CHECK(arena->blocks() == 7);
  CHECK(arena->block_bytes() == 9196);
  CHECK(arena->payload_bytes() == 7 * 9196);
  CHECK(arena->owned());
  CHECK_FALSE(arena->pinned());
  REQUIRE(arena->segments().size() == 3);
  const std::byte* next = arena->segments()[0].base;
  CHECK(reinterpret_cast<std::uintptr_t>(next) % kHugePageBytes == 0);
  for (const Segment& segment : arena->segments()) {
    CHECK(segment.base == next);
    CHECK(segment.stride == segment.bytes);
    next += 7 * segment.bytes;
  }
  CHECK(is_zero(*arena));
  CHECK(is_usable(*arena));
}

TEST_CASE("the memory of an arena is committed when it is made") {
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{4096}, std::size_t{4097}, kHugePageBytes - 1,
                                  kHugePageBytes, kHugePageBytes + 1, 5 * kHugePageBytes + 12345}) {
    CAPTURE(bytes);
    for (const HugePages huge_pages : {HugePages::kAuto, HugePages::kNever}) {
      ArenaOptions options = options_of(1, {bytes});
      options.huge_pages = huge_pages;
      const auto arena = make_owned_arena(options);
      CHECK(arena->mapped_bytes() == (bytes + page() - 1) / page() * page());
      struct stat status{};
      REQUIRE(fstat(arena->memfd(), &status) == 0);
      CHECK(static_cast<std::size_t>(status.st_size) == arena->mapped_bytes());
      const auto used = static_cast<std::size_t>(status.st_blocks) * 512;
      CHECK(used >= arena->mapped_bytes());                  // committed
      CHECK(used < arena->mapped_bytes() + kHugePageBytes);  // and not more than a huge page rounds up to
      CHECK(arena->huge_page_bytes() <= arena->mapped_bytes() / kHugePageBytes * kHugePageBytes);
      if (huge_pages == HugePages::kNever) {
        CHECK(arena->huge_page_bytes() == 0);
        CHECK(used == arena->mapped_bytes());
      }
    }
  }
}

TEST_CASE("required huge pages are all there, or an error says so") {
  ArenaOptions options = options_of(5, {kHugePageBytes + 1000});
  options.huge_pages = HugePages::kRequire;
  try {
    const auto arena = make_owned_arena(options);
    CHECK(arena->huge_page_bytes() == 5 * kHugePageBytes);
    CHECK(is_zero(*arena));
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::kUnsupported);
    CHECK(field_of(error, "needed_bytes") == static_cast<std::int64_t>(5 * kHugePageBytes));
    CHECK(mappings_of_arenas() == 0);
  }
  options.segment_bytes = {100};  // nothing to require huge pages for
  CHECK(make_owned_arena(options)->huge_page_bytes() == 0);
}

TEST_CASE("an arena of many slices is committed by several threads") {
  for (const int threads : {-1, 1, 3}) {
    ArenaOptions options = options_of(300, {std::size_t{1} << 20});
    options.commit_threads = threads;
    const auto arena = make_owned_arena(options);
    struct stat status{};
    REQUIRE(fstat(arena->memfd(), &status) == 0);
    CHECK(static_cast<std::size_t>(status.st_blocks) * 512 == arena->mapped_bytes());
  }
}

TEST_CASE("an arena without blocks has no memory") {
  const int descriptors = open_descriptors();
  const auto arena = make_owned_arena(options_of(0, {4096, 8192}));
  CHECK(arena->blocks() == 0);
  CHECK(arena->block_bytes() == 12288);
  CHECK(arena->payload_bytes() == 0);
  CHECK(arena->mapped_bytes() == 0);
  CHECK(arena->memfd() == -1);
  CHECK(arena->segments().size() == 2);
  CHECK(open_descriptors() == descriptors);
}

TEST_CASE("an arena leaves neither descriptor nor mapping behind") {
  const int descriptors = open_descriptors();
  {
    const auto arena = make_owned_arena(options_of(3, {100000}));
    CHECK(open_descriptors() == descriptors + 1);
    CHECK(mappings_of_arenas() == 1);
  }
  CHECK(open_descriptors() == descriptors);
  CHECK(mappings_of_arenas() == 0);
}

TEST_CASE("the address space that was taken to align an arena is returned while it lives") {
  const std::uint64_t before = reserved_bytes();
  std::vector<std::shared_ptr<Arena>> arenas;
  for (int i = 0; i < 8; ++i) {
    arenas.push_back(make_owned_arena(options_of(1, {4096 + 4096 * static_cast<std::size_t>(i)})));
  }
  CHECK(reserved_bytes() < before + (std::uint64_t{1} << 20));  // a sanitizer's allocator reserves a little, too
}

TEST_CASE("a peer that is given the descriptor can map the memory, and cannot resize it") {
  const auto arena = make_owned_arena(options_of(2, {10000}));
  void* view = mmap(nullptr, arena->mapped_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, arena->memfd(), 0);
  REQUIRE(view != MAP_FAILED);
  std::memcpy(arena->segments()[0].base + 10000, "hello", 6);
  CHECK(std::strcmp(static_cast<const char*>(view) + 10000, "hello") == 0);
  munmap(view, arena->mapped_bytes());
  CHECK(ftruncate(arena->memfd(), 0) != 0);
  CHECK(ftruncate(arena->memfd(), 1 << 20) != 0);
  CHECK((fcntl(arena->memfd(), F_GETFD) & FD_CLOEXEC) != 0);
}

TEST_CASE("impossible sizes are argument errors") {
  CHECK(error_of(options_of(1, {})).code() == ErrorCode::kArgument);
  CHECK(error_of(options_of(1, {4096, 0})).code() == ErrorCode::kArgument);
  CHECK(error_of(options_of(0, {0})).code() == ErrorCode::kArgument);
  CHECK(error_of(options_of(kBlocksMax + 1, {1})).code() == ErrorCode::kArgument);
  CHECK(error_of(options_of(1, {SIZE_MAX})).code() == ErrorCode::kArgument);
  CHECK(error_of(options_of(1, {SIZE_MAX / 4, SIZE_MAX / 4, SIZE_MAX / 4, SIZE_MAX / 4, 5})).code() ==
        ErrorCode::kArgument);
  CHECK(error_of(options_of(kBlocksMax, {std::size_t{1} << 42})).code() == ErrorCode::kArgument);
}

TEST_CASE("an arena that does not fit the machine is refused with the numbers") {
  const Error error = error_of(options_of(1 << 20, {std::size_t{1} << 26}));
  CHECK(error.code() == ErrorCode::kOutOfMemory);
  CHECK(field_of(error, "needed_bytes") == std::int64_t{1} << 46);
  CHECK(field_of(error, "available_bytes") > 0);
  CHECK(field_of(error, "available_bytes") < std::int64_t{1} << 46);
  CHECK(std::string(error.what()).find(memory_headroom().limit) != std::string::npos);
}

TEST_CASE("the memory check leaves a reserve and can be switched off") {
  const std::uint64_t available = memory_headroom().available_bytes;
  if (available > std::uint64_t{1} << 40) {
    return;  // no limit that a test could come near
  }
  const auto blocks = static_cast<std::uint32_t>(available >> 20);
  CHECK(error_of(options_of(blocks, {std::size_t{1} << 20})).code() == ErrorCode::kOutOfMemory);
  ArenaOptions options = options_of(1, {4096});
  options.check_memory = false;
  CHECK(is_usable(*make_owned_arena(options)));
}

TEST_CASE("address space that is used up is an out-of-memory error") {
  const int status = test::run_in_child([] {
    ArenaOptions options = options_of(1 << 14, {std::size_t{1} << 32});  // 64 TiB, half of the address space
    options.check_memory = false;
    const auto held =
        mmap(nullptr, std::size_t{1} << 46, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    static_cast<void>(held);
    return error_of(options).code() == ErrorCode::kOutOfMemory ? 0 : 1;
  });
  CHECK(status == 0);
}

TEST_CASE("a limit on file sizes is an error and not a signal") {
  const int status = test::run_in_child([] {
    const rlimit limit{1 << 20, 1 << 20};
    setrlimit(RLIMIT_FSIZE, &limit);
    const Error error = error_of(options_of(1, {std::size_t{2} << 20}));
    return error.code() == ErrorCode::kOutOfMemory && field_of(error, "available_bytes") == 1 << 20 ? 0 : 1;
  });
  CHECK(status == 0);
}

TEST_CASE("an arena can be placed on a NUMA node, and only on one that exists") {
  ArenaOptions options = options_of(1, {std::size_t{3} << 20});
  options.numa_node = 0;
  try {
    CHECK(is_usable(*make_owned_arena(options)));
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::kUnsupported);  // a sandbox that forbids it
  }
  for (const int node : {1023, 1024, 1 << 30}) {
    CAPTURE(node);
    options.numa_node = node;
    const Error error = error_of(options);
    CHECK((error.code() == ErrorCode::kArgument || error.code() == ErrorCode::kUnsupported));
    CHECK(field_of(error, "numa_node") == node);
  }
  options.numa_node = -2;
  CHECK(error_of(options).code() == ErrorCode::kArgument);
  options.blocks = 0;
  CHECK(error_of(options).code() == ErrorCode::kArgument);
}

TEST_CASE("a long label is cut and an empty one replaced") {
  ArenaOptions options = options_of(1, {100});
  options.label = std::string(10000, 'x');
  CHECK(is_usable(*make_owned_arena(options)));
  options.label.clear();
  CHECK(is_usable(*make_owned_arena(options)));
}

TEST_CASE("a forked child frees nothing of an arena, and its parent goes on with it") {
  auto arena = make_owned_arena(options_of(2, {kHugePageBytes}));
  const int status = test::run_in_child([&] {
    std::byte* base = arena->segments()[0].base;
    const int fd = arena->memfd();
    arena.reset();
    base[5] = std::byte{42};  // still mapped
    return fcntl(fd, F_GETFD) >= 0 && mappings_of_arenas() == 1 ? 0 : 1;
  });
  CHECK(status == 0);
  CHECK(arena->segments()[0].base[5] == std::byte{42});
  CHECK(is_usable(*arena));
}

TEST_CASE("an arena that a forked child makes itself is freed by the child") {
  const int status = test::run_in_child([] {
    {
      const auto arena = make_owned_arena(options_of(2, {kHugePageBytes}));
    }
    return mappings_of_arenas();
  });
  CHECK(status == 0);
}

}  // namespace
}  // namespace kvpool::testing
