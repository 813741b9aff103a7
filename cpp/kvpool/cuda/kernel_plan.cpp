#include "kvpool/cuda/kernel_plan.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kvpool/base/error.h"

namespace kvpool::cuda {
namespace {

constexpr std::uint64_t kAddressMax = std::uint64_t{1} << 62;  // and of a stride: sums of two cannot overflow
constexpr std::uint32_t kTilesMax = (std::uint32_t{1} << 31) - 1;
constexpr std::uint64_t kStripBytesMax = std::uint64_t{kTilesMax} * kTileUnits;  // 256 GiB: one launch, byte by byte
constexpr std::size_t kInlineStripsMax = kInlineTableBytes / 2 / sizeof(DeviceStrip);

[[noreturn]] void refuse(const std::string& what, std::initializer_list<ErrorField> fields = {}) {
  throw Error(ErrorCode::kArgument, "a kernel cannot be launched: " + what, fields);
}

std::uint64_t address_of(const std::byte* pointer) noexcept { return reinterpret_cast<std::uintptr_t>(pointer); }

// What a job's strips are, seen from one side.
struct Side {
  const std::byte* base;
  std::uint64_t stride;
  std::uint64_t bytes;
};

void check_side(const Side& side, const char* name, std::size_t strip, std::uint32_t block_max) {
  const auto at = static_cast<std::int64_t>(strip);
  if (side.base == nullptr) refuse(std::string("strip ") + std::to_string(at) + " has no " + name, {{"strip", at}});
  const bool fits = address_of(side.base) < kAddressMax && side.bytes < kAddressMax && side.stride < kAddressMax;
  if (!fits || (side.stride > 0 && block_max > kAddressMax / side.stride)) {
    refuse(std::string("strip ") + std::to_string(at) + " reaches beyond all memory on its side '" + name + "'",
           {{"strip", at}, {"block", block_max}});
  }
}

// Largest block numbers of the pairs.
BlockPair blocks_max(std::span<const BlockPair> pairs) noexcept {
  BlockPair most{0, 0};
  for (const BlockPair& pair : pairs) most = {std::max(most.from, pair.from), std::max(most.to, pair.to)};
  return most;
}

// The least distance between the numbers of two pairs' destinations; 0 if two have the same. REQUIRES: two pairs.
std::uint64_t least_distance(std::span<const BlockPair> pairs) {
  std::vector<std::uint32_t> blocks(pairs.size());
  std::ranges::transform(pairs, blocks.begin(), &BlockPair::to);
  std::ranges::sort(blocks);
  std::uint64_t least = ~std::uint64_t{0};
  for (std::size_t i = 1; i < blocks.size(); ++i) least = std::min<std::uint64_t>(least, blocks[i] - blocks[i - 1]);
  return least;
}

// `most`: blocks_max(pairs), which costs more than all that is checked of a strip.
void check_strips(std::span<const PlannedStrip> strips, std::span<const BlockPair> pairs, const BlockPair& most) {
  if (strips.size() > kTilesMax || pairs.size() > kTilesMax) refuse("more strips or pairs than can be counted");
  std::optional<std::uint64_t> distance;  // of the pairs; found when the first strip needs it
  for (std::size_t s = 0; s < strips.size(); ++s) {
    const PlannedStrip& strip = strips[s];
    const auto at = static_cast<std::int64_t>(s);
    if (strip.bytes == 0) refuse("strip " + std::to_string(s) + " is empty", {{"strip", at}});
    if (strip.bytes > kStripBytesMax) {
      refuse("strip " + std::to_string(s) + " is " + std::to_string(strip.bytes) + " bytes long", {{"strip", at}});
    }
    check_side({strip.from, strip.from_stride, strip.bytes}, "source", s, most.from);
    check_side({strip.to, strip.to_stride, strip.bytes}, "destination", s, most.to);
    // Reading a block twice is no fault, so only the destination's stride matters. It may be shorter than the strip: in
    // a space, blocks are numbered by their first units.
    if (pairs.size() <= 1 || strip.to_stride >= strip.bytes) continue;
    if (!distance) distance = least_distance(pairs);
    if (strip.to_stride > 0 && *distance >= (strip.bytes - 1) / strip.to_stride + 1) continue;
    refuse("strip " + std::to_string(s) + " writes " + std::to_string(strip.bytes) +
               " bytes of a block and the next block is " + std::to_string(*distance * strip.to_stride) + " bytes on",
           {{"strip", at}, {"bytes", static_cast<std::int64_t>(strip.bytes)}});
  }
}

std::uint64_t tiles_of(std::uint64_t units) noexcept {
  return std::max<std::uint64_t>(1, units / kTileUnits + (units % kTileUnits != 0 ? 1 : 0));
}

// All bits that any address or stride has.
std::uint64_t address_bits(std::span<const PlannedStrip> strips, bool several, bool to) noexcept {
  std::uint64_t bits = 0;
  for (const PlannedStrip& strip : strips) {
    bits |= address_of(to ? strip.to : strip.from);
    if (several) bits |= to ? strip.to_stride : strip.from_stride;
  }
  return bits;
}

std::uint32_t width_of(std::uint64_t bits) noexcept { return bits % 16 == 0 ? 16 : bits % 4 == 0 ? 4 : 1; }

// The strips of one launch, and how many tiles they are of each pair.
struct StripGroup {
  std::size_t first;
  std::size_t count;
  std::uint32_t tiles;

  // Pairs of one launch, by its tiles. Tiles are at least one: a strip is never empty.
  std::size_t pairs_max() const noexcept { return kTilesMax / std::max<std::uint32_t>(1, tiles); }
};

// As many strips from `first` on as one launch takes. At least one: kStripBytesMax.
StripGroup group_of(std::uint32_t width, std::span<const PlannedStrip> strips, std::size_t first,
                    std::size_t count_max) {
  StripGroup group{first, 0, 0};
  while (group.count < count_max && first + group.count < strips.size()) {
    const std::uint64_t tiles = group.tiles + tiles_of(strips[first + group.count].bytes / width);
    if (tiles > kTilesMax) break;
    group.tiles = static_cast<std::uint32_t>(tiles);
    ++group.count;
  }
  return group;
}

// Writes header and data of a table. REQUIRES: group.tiles * pairs.size() <= kTilesMax.
void write_table(std::uint32_t width, std::span<const PlannedStrip> strips, const StripGroup& group,
                 std::span<const BlockPair> pairs, TableHeader& header, std::byte* data) noexcept {
  std::uint32_t tiles = 0;
  const std::uint64_t tiles_first = tiles_of(strips[group.first].bytes / width);
  bool same = true;
  for (std::size_t k = 0; k < group.count; ++k) {
    const PlannedStrip& strip = strips[group.first + k];
    const std::uint64_t units = strip.bytes / width;
    const DeviceStrip entry{
        address_of(strip.from),
        address_of(strip.to),
        strip.from_stride,
        strip.to_stride,
        units,
        tiles,
        static_cast<std::uint32_t>(strip.bytes % width),
    };
    std::memcpy(data + k * sizeof(entry), &entry, sizeof(entry));
    same = same && tiles_of(units) == tiles_first;
    tiles += static_cast<std::uint32_t>(tiles_of(units));
  }
  header = {};
  header.tiles = tiles * static_cast<std::uint32_t>(pairs.size());
  header.strips = static_cast<std::uint32_t>(group.count);
  header.tiles_of_pair = FastDivider(tiles);
  if (same) {
    header.tiles_of_strip = FastDivider(static_cast<std::uint32_t>(tiles_first));
  } else {
    header.tiles_of_strip.divisor = 0;
  }
  static_assert(sizeof(BlockPair) == sizeof(DevicePair));
  std::memcpy(data + table_bytes(group.count, 0), pairs.data(), pairs.size_bytes());
}

int launch_plan(std::uint32_t width, std::span<const PlannedStrip> strips, std::span<const BlockPair> pairs,
                const TableSpace& space, LaunchFunction launch, void* context) {
  if (strips.empty() || pairs.empty()) return 0;
  const std::size_t whole = table_bytes(strips.size(), pairs.size());
  if (whole > kInlineTableBytes && whole <= space.bytes && space.host != nullptr && space.device != nullptr) {
    const StripGroup all = group_of(width, strips, 0, strips.size());
    if (all.count == strips.size() && pairs.size() <= all.pairs_max()) {
      TableHeader header;
      write_table(width, strips, all, pairs, header, space.host);
      return launch(context, {width, &header, space.host, whole, space.device});
    }
  }
  InlineTable<kInlineTableBytes> table;  // only what is used of it is written
  std::byte* data = reinterpret_cast<std::byte*>(table.data);
  for (std::size_t first = 0; first < strips.size();) {
    const StripGroup group = group_of(width, strips, first, kInlineStripsMax);
    const std::size_t room = (kInlineTableBytes - table_bytes(group.count, 0)) / sizeof(DevicePair);
    const std::size_t pairs_max = std::min(room, group.pairs_max());
    for (std::size_t taken = 0; taken < pairs.size(); taken += pairs_max) {
      const auto some = pairs.subspan(taken, std::min(pairs.size() - taken, pairs_max));
      write_table(width, strips, group, some, table.header, data);
      const int result = launch(context, {width, &table.header, data, table_bytes(group.count, some.size()), nullptr});
      if (result != 0) return result;
    }
    first += group.count;
  }
  return 0;
}

// Bytes that a job touches.
struct Touched {
  std::uint64_t begin;
  std::uint64_t end;
  bool written;
};

bool any_overlap(std::vector<Touched>& touched) {
  std::sort(touched.begin(), touched.end(), [](const Touched& a, const Touched& b) { return a.begin < b.begin; });
  std::uint64_t read_end = 0;
  std::uint64_t written_end = 0;
  for (const Touched& one : touched) {
    if (one.begin < written_end || (one.written && one.begin < read_end)) return true;
    std::uint64_t& end = one.written ? written_end : read_end;
    end = std::max(end, one.end);
  }
  return false;
}

void check(const CopyJob& job, const BlockPair& most) {
  check_strips(job.strips, job.pairs, most);
#ifdef KVPOOL_DEBUG
  if (overlaps(job)) refuse("a byte that it writes is read or written by another piece of it");
#endif
}

}  // namespace

void check_job(const CopyJob& job) { check(job, blocks_max(job.pairs)); }

int launch_job(const CopyJob& job, const TableSpace& space, LaunchFunction launch, void* context) {
  const BlockPair most = blocks_max(job.pairs);
  check(job, most);
  const bool several = most.from > 0 || most.to > 0;  // blocks other than 0 are reached by the stride
  const std::uint32_t width =
      width_of(address_bits(job.strips, several, false) | address_bits(job.strips, several, true));
  return launch_plan(width, job.strips, job.pairs, space, launch, context);
}

bool overlaps(const CopyJob& job) {
  std::vector<Touched> touched;
  const auto add = [&](std::uint64_t begin, std::uint64_t bytes, bool written) {
    touched.push_back({begin, begin + bytes, written});
  };
  for (const PlannedStrip& strip : job.strips) {
    for (const BlockPair& pair : job.pairs) {
      add(address_of(strip.from) + pair.from * strip.from_stride, strip.bytes, false);
      add(address_of(strip.to) + pair.to * strip.to_stride, strip.bytes, true);
    }
  }
  return any_overlap(touched);
}

}  // namespace kvpool::cuda
