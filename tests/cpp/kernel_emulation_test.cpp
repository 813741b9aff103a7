// The kernels' arithmetic, thread by thread: every byte of a job is written exactly once, nothing else is touched,
// every access is aligned, and the result is the reference's.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "fuzz_seeds.h"
#include "kernel_emulator.h"
#include "kvpool/cuda/kernels.h"

namespace kvpool::cuda {
namespace {

using testing::Dice;
using testing::Emulation;

using Bytes = std::vector<std::byte>;

// A buffer that begins at a chosen distance from a multiple of 16.
struct Buffer {
  Buffer(std::size_t bytes, std::size_t offset, Dice& dice) : whole(bytes + offset + 16) {
    for (std::byte& one : whole) one = static_cast<std::byte>(dice.below(256));
    const auto address = reinterpret_cast<std::uintptr_t>(whole.data());
    base = whole.data() + (16 - address % 16) % 16 + offset;
  }
  Bytes whole;
  std::byte* base;
};

// Which bytes of a job are read and written, by nothing but its definition.
void allow(Emulation& emulation, const CopyJob& job) {
  for (const PlannedStrip& strip : job.strips) {
    for (const BlockPair& pair : job.pairs) {
      emulation.memory.may_read(strip.from + pair.from * strip.from_stride, strip.bytes);
      emulation.memory.may_write(strip.to + pair.to * strip.to_stride, strip.bytes);
    }
  }
}

// Runs the job twice over the same destination, by the reference and thread by thread. `from` and `to` hold all of it.
Emulation compare(const CopyJob& job, const Buffer& from, Buffer& to, const TableSpace& space, std::uint32_t blocks) {
  REQUIRE_FALSE(overlaps(job));
  const Bytes before = to.whole;
  REQUIRE(reference_kernels().copy(job, nullptr, {}) == 0);
  const Bytes expected = to.whole;
  std::copy(before.begin(), before.end(), to.whole.begin());
  Emulation emulation;
  emulation.blocks = blocks;
  emulation.memory.know(from.whole.data(), from.whole.size());
  emulation.memory.know(to.whole.data(), to.whole.size());
  allow(emulation, job);
  REQUIRE(launch_job(job, space, &Emulation::launch, &emulation) == 0);
  CHECK(emulation.memory.wrong() == "");
  CHECK(to.whole == expected);
  return emulation;
}

std::vector<std::uint32_t> some_blocks(Dice& dice, std::size_t count, std::uint32_t of) {
  std::vector<std::uint32_t> all(of);
  std::iota(all.begin(), all.end(), 0u);
  for (std::size_t i = 0; i < count; ++i) std::swap(all[i], all[i + dice.below(of - i)]);
  all.resize(count);
  return all;
}

struct Shape {
  std::vector<PlannedStrip> strips;
  std::vector<BlockPair> pairs;
  std::size_t from_bytes = 0;  // of the buffers
  std::size_t to_bytes = 0;
};

// Strips of random lengths in two arenas of random layout: offsets are set once the buffers are there.
Shape random_shape(Dice& dice, std::size_t align, std::size_t bytes_max) {
  const auto round = [&](std::size_t bytes) { return (bytes + align - 1) / align * align; };
  Shape shape;
  const std::uint32_t from_blocks = 1 + dice.below(9);
  const std::uint32_t to_blocks = 1 + dice.below(9);
  const std::size_t count = 1 + dice.below(std::min(from_blocks, to_blocks));
  const auto from = some_blocks(dice, count, from_blocks);
  const auto to = some_blocks(dice, count, to_blocks);
  for (std::size_t i = 0; i < count; ++i) shape.pairs.push_back({from[i], to[i]});
  const bool same = dice.one_in(2);
  const std::size_t same_bytes = 1 + dice.below(bytes_max);
  const std::uint32_t strips = 1 + dice.below(6);
  for (std::uint32_t s = 0; s < strips; ++s) {
    const std::size_t bytes = same ? same_bytes : 1 + dice.below(bytes_max);
    // Lengths need not be multiples of anything; where the next block begins must be.
    const std::size_t from_stride = round(bytes + dice.below(40));
    const std::size_t to_stride = round(bytes + dice.below(40));
    shape.strips.push_back(PlannedStrip{reinterpret_cast<const std::byte*>(shape.from_bytes),
                                        reinterpret_cast<std::byte*>(shape.to_bytes), bytes, from_stride, to_stride});
    shape.from_bytes += from_blocks * from_stride;
    shape.to_bytes += to_blocks * to_stride;
  }
  return shape;
}

void place(Shape& shape, const Buffer& from, const Buffer& to) {
  for (PlannedStrip& strip : shape.strips) {
    strip.from = from.base + reinterpret_cast<std::uintptr_t>(strip.from);
    strip.to = to.base + reinterpret_cast<std::uintptr_t>(strip.to);
  }
}

// Memory for tables, none half of the time.
struct Space {
  explicit Space(bool any) : host(any ? 1 << 16 : 0), device(host.size()) {}
  TableSpace get() { return {host.data(), device.data(), host.size()}; }
  Bytes host;
  Bytes device;
};

TEST_CASE("a copy kernel writes every byte once, whatever the alignment and the lengths") {
  for (const std::uint64_t seed : testing::fuzz_seeds()) {
    CAPTURE(seed);
    Dice dice(seed);
    for (int i = 0; i < testing::fuzz_length(120); ++i) {
      const std::size_t align = std::size_t{1} << dice.below(5);
      Shape shape = random_shape(dice, align, dice.one_in(3) ? 9000 : 600);
      const std::size_t from_offset = dice.one_in(3) ? dice.below(16) / align * align : 0;
      const std::size_t to_offset = dice.one_in(3) ? dice.below(16) / align * align : from_offset;
      Buffer from(shape.from_bytes, from_offset, dice);
      Buffer to(shape.to_bytes, to_offset, dice);
      place(shape, from, to);
      Space space(dice.one_in(2));
      const auto emulation = compare(CopyJob{shape.strips, shape.pairs}, from, to, space.get(), 1 + dice.below(4));
      REQUIRE(emulation.widths.size() == 1);
      if (align == 16 && from_offset == 0 && to_offset == 0) CHECK(emulation.widths[0] == 16);
    }
  }
}

TEST_CASE("lengths around the end of a tile") {
  Dice dice(6);
  for (const std::size_t tiles : {1, 2, 3}) {
    for (const int more : {-17, -16, -1, 0, 1, 15, 16, 17}) {
      const std::size_t tile_bytes = std::size_t{kTileUnits} * sizeof(Unit16);
      const std::size_t bytes = static_cast<std::size_t>(static_cast<int>(tiles * tile_bytes) + more);
      CAPTURE(bytes);
      Buffer from(2 * bytes + 64, 0, dice);
      Buffer to(2 * bytes + 64, 0, dice);
      const std::size_t stride = (bytes + 15) / 16 * 16;
      const std::vector<PlannedStrip> strips{{from.base, to.base, bytes, stride, stride}};
      const std::vector<BlockPair> pairs{{1, 0}, {0, 1}};
      CHECK(compare(CopyJob{strips, pairs}, from, to, {}, 1).widths[0] == 16);
    }
  }
}

TEST_CASE("blocks at any unit, longer than the stride, are copied between media of units") {
  Dice dice(8);
  for (const std::size_t unit : {16, 20, 48}) {
    const std::size_t bytes = 5 * unit - 3;
    Buffer from(40 * unit, 0, dice);
    Buffer to(40 * unit, 0, dice);
    const std::vector<PlannedStrip> strips{{from.base, to.base, bytes, unit, unit}};
    const std::vector<BlockPair> pairs{{3, 21}, {30, 0}, {9, 7}, {14, 35}, {20, 12}};
    compare(CopyJob{strips, pairs}, from, to, {}, 2);
  }
}

TEST_CASE("a job that exceeds one launch is cut, or uses the table space") {
  Dice dice(3);
  const std::size_t bytes = 16;
  const std::uint32_t blocks = 10'000;
  Buffer from(blocks * bytes, 0, dice);
  Buffer to(blocks * bytes, 0, dice);
  const std::vector<PlannedStrip> strips{{from.base, to.base, bytes, bytes, bytes}};
  const auto sources = some_blocks(dice, blocks, blocks);
  std::vector<BlockPair> pairs;
  for (std::uint32_t i = 0; i < blocks; ++i) pairs.push_back({sources[i], i});
  const CopyJob job{strips, pairs};
  CHECK(table_bytes_of(1, blocks) > kInlineTableBytes);
  const auto cut = compare(job, from, to, {}, 2);
  CHECK(cut.widths.size() == 3);
  CHECK(cut.remote_tables == 0);

  Bytes host(table_bytes_of(1, blocks));
  Bytes device(host.size());
  const auto whole = compare(job, from, to, {host.data(), device.data(), host.size()}, 2);
  CHECK(whole.widths.size() == 1);
  CHECK(whole.remote_tables == 1);
  const auto too_little = compare(job, from, to, {host.data(), device.data(), host.size() - 1}, 2);
  CHECK(too_little.widths.size() == 3);
}

TEST_CASE("strips that exceed one launch are cut as well") {
  Dice dice(4);
  const std::size_t strips_count = 700;
  Buffer from(strips_count * 64, 0, dice);
  Buffer to(strips_count * 64, 0, dice);
  std::vector<PlannedStrip> strips;
  for (std::size_t s = 0; s < strips_count; ++s) {
    strips.push_back({from.base + s * 64, to.base + s * 64, 32, 32, 32});
  }
  const std::vector<BlockPair> pairs{{1, 0}, {0, 1}};
  const auto emulation = compare(CopyJob{strips, pairs}, from, to, {}, 2);
  CHECK(emulation.widths.size() == 3);
  for (const std::size_t bytes : emulation.tables) CHECK(bytes <= kInlineTableBytes);
}

TEST_CASE("a launch that fails ends the job") {
  int calls = 0;
  const auto fail = [](void* context, const TableLaunch&) { return ++*static_cast<int*>(context) == 2 ? 700 : 0; };
  const std::vector<PlannedStrip> strips{
      {reinterpret_cast<std::byte*>(4096), reinterpret_cast<std::byte*>(1 << 20), 16, 16, 16}};
  std::vector<BlockPair> pairs(12'000);
  for (std::uint32_t i = 0; i < pairs.size(); ++i) pairs[i] = {i, i};
  CHECK(launch_job(CopyJob{strips, pairs}, {}, fail, &calls) == 700);
  CHECK(calls == 2);
}

// A memory in which only written bytes exist: addresses may be anywhere.
struct SparseMemory {
  std::map<std::uint64_t, std::uint64_t> copied;  // destination of a unit to its source
  std::uint64_t last = 0;
  template <class T>
  T load(std::uint64_t address) {
    T unit{};
    static_assert(sizeof(T) == 16 || sizeof(T) == 1);
    std::memcpy(&unit, &address, std::min(sizeof(unit), sizeof(address)));
    return unit;
  }
  template <class T>
  void store(std::uint64_t address, const T& unit) {
    std::uint64_t from = 0;
    std::memcpy(&from, &unit, std::min(sizeof(unit), sizeof(from)));
    CHECK(copied.emplace(address, from).second);
  }
};

TEST_CASE("offsets have 64 bits") {
  // Blocks of 3 GiB, of which 4 KiB are copied: block 40 lies beyond 2^36.
  const std::uint64_t stride = std::uint64_t{3} << 30;
  const std::uint64_t from = std::uint64_t{1} << 40;
  const std::uint64_t to = std::uint64_t{1} << 44;
  const std::vector<PlannedStrip> strips{{reinterpret_cast<std::byte*>(from), reinterpret_cast<std::byte*>(to), 4096,
                                          static_cast<std::size_t>(stride), static_cast<std::size_t>(stride)}};
  const std::vector<BlockPair> pairs{{40, 7}, {2, 41}};
  SparseMemory memory;
  const auto launch = [](void* context, const TableLaunch& one) {
    const TableView view{one.header, reinterpret_cast<const unsigned char*>(one.data)};
    for (std::uint32_t thread = 0; thread < kBlockThreads; ++thread) {
      run_thread<CopyWork<Unit16>>(view, 0, 1, thread, *static_cast<SparseMemory*>(context));
    }
    return 0;
  };
  REQUIRE(launch_job(CopyJob{strips, pairs}, {}, launch, &memory) == 0);
  CHECK(memory.copied.size() == 2 * 4096 / 16);
  for (const BlockPair& pair : pairs) {
    for (std::uint64_t at = 0; at < 4096; at += 16) {
      CHECK(memory.copied.at(to + pair.to * stride + at) == from + pair.from * stride + at);
    }
  }
}

TEST_CASE("a divider divides as division does") {
  Dice dice(5);
  const std::uint32_t most = (1u << 31) - 1;
  std::vector<std::uint32_t> numbers{1, 2, 3, 5, 7, 10, 127, 128, 129, 641, 65535, 65536, 1u << 30, most - 1, most};
  for (int i = 0; i < 200; ++i) numbers.push_back(1 + dice.below(std::uint64_t{1} << (1 + dice.below(31))) % most);
  for (const std::uint32_t divisor : numbers) {
    const FastDivider divider(divisor);
    std::vector<std::uint32_t> values{0, 1, most, most - 1, divisor, divisor - 1};
    for (const std::uint64_t times : {2, 3, 1000, 1 << 20}) {
      const std::uint64_t multiple = times * divisor;
      if (multiple < most)
        values.insert(values.end(), {static_cast<std::uint32_t>(multiple - 1), static_cast<std::uint32_t>(multiple)});
    }
    for (int i = 0; i < 200; ++i) values.push_back(dice.below(std::uint64_t{1} << 31));
    for (const std::uint32_t value : values) REQUIRE(divider.divide(value) == value / divisor);
  }
}

}  // namespace
}  // namespace kvpool::cuda
