#include "kvpool/arena/arena.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "child_process.h"
#include "kvpool/arena/commit.h"
#include "kvpool/base/address.h"
#include "kvpool/base/error.h"

namespace kvpool {
namespace {

constexpr const char* kLabel = "kvpool-arena-test";
constexpr int kMadvPopulateWrite = 23;
constexpr int kMadvCollapse = 25;
constexpr int kAdviceArgument = 2;

ArenaOptions options_of(std::uint32_t blocks, std::vector<std::size_t> segment_bytes) {
  ArenaOptions options;
  options.blocks = blocks;
  options.segment_bytes = std::move(segment_bytes);
  options.label = kLabel;
  if (!test::kChildMayStartThreads) {
    options.commit_threads = 1;
  }
  return options;
}

std::size_t page() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

int open_descriptors() {
  return static_cast<int>(std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {}));
}

int mappings_of_arenas() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find(kLabel) != std::string::npos ? 1 : 0;
  }
  return count;
}

// Address space that is held without being usable.
std::uint64_t reserved_bytes() {
  std::ifstream maps("/proc/self/maps");
  std::uint64_t bytes = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find(" ---p ") != std::string::npos) {
      bytes += std::stoull(line.substr(line.find('-') + 1), nullptr, 16) - std::stoull(line, nullptr, 16);
    }
  }
  return bytes;
}

// The error that making an arena throws. Nothing may be left of the arena.
Error error_of(const ArenaOptions& options) {
  const int descriptors = open_descriptors();
  const int mappings = mappings_of_arenas();
  try {
    make_owned_arena(options);
  } catch (const Error& error) {
    if (open_descriptors() != descriptors || mappings_of_arenas() != mappings) {
      throw std::logic_error("an arena that failed has left something behind");  // is seen from a forked child, too
    }
    return error;
  }
  throw std::logic_error("an arena that should have failed was made");
}

std::int64_t field_of(const Error& error, const std::string& name) {
  for (const auto& [key, value] : error.fields()) {
    if (key == name) {
      return value;
    }
  }
  return -1;
}

bool is_zero(const Arena& arena) {
  const std::byte* base = arena.segments().front().base;
  return std::all_of(base, base + arena.payload_bytes(), [](std::byte byte) { return byte == std::byte{0}; });
}

// Writes and reads back a byte of every page, as a user would.
bool is_usable(const Arena& arena) {
  std::byte* base = arena.segments().front().base;
  for (std::size_t at = 0; at < arena.mapped_bytes(); at += 512) {
    base[at] = static_cast<std::byte>(at / 512 % 251);
  }
  for (std::size_t at = 0; at < arena.mapped_bytes(); at += 512) {
    if (base[at] != static_cast<std::byte>(at / 512 % 251)) {
      return false;
    }
  }
  return true;
}

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
}  // namespace kvpool
