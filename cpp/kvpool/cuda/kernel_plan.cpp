#include "kvpool/cuda/kernel_plan.h"

#include <algorithm>
#include <cmath>
#include <cstring>
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
  std::uint64_t extent;  // from the first byte of a block's part to behind its last
};

void check_side(const Side& side, const char* name, std::size_t strip, std::uint32_t block_max) {
  const auto at = static_cast<std::int64_t>(strip);
  if (side.base == nullptr) refuse(std::string("strip ") + std::to_string(at) + " has no " + name, {{"strip", at}});
  const bool fits = address_of(side.base) < kAddressMax && side.extent < kAddressMax && side.stride < kAddressMax;
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

// `extents`: of a strip, on both sides.
template <class Extents>
void check_strips(std::span<const PlannedStrip> strips, std::span<const BlockPair> pairs, Extents extents) {
  if (strips.size() > kTilesMax || pairs.size() > kTilesMax) refuse("more strips or pairs than can be counted");
  const BlockPair most = blocks_max(pairs);
  for (std::size_t s = 0; s < strips.size(); ++s) {
    const PlannedStrip& strip = strips[s];
    const auto at = static_cast<std::int64_t>(s);
    if (strip.bytes == 0) refuse("strip " + std::to_string(s) + " is empty", {{"strip", at}});
    if (strip.bytes > kStripBytesMax) {
      refuse("strip " + std::to_string(s) + " is " + std::to_string(strip.bytes) + " bytes long", {{"strip", at}});
    }
    const auto [from, to] = extents(strip);
    check_side({strip.from, strip.from_stride, from}, "source", s, most.from);
    check_side({strip.to, strip.to_stride, to}, "destination", s, most.to);
    // Reading a block twice is no fault, so only the destination's stride matters.
    if (pairs.size() > 1 && strip.to_stride < to) {
      refuse("strip " + std::to_string(s) + " writes " + std::to_string(to) +
                 " bytes of a block and the next block is " + std::to_string(strip.to_stride) + " bytes on",
             {{"strip", at}, {"bytes", static_cast<std::int64_t>(to)}});
    }
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

// Blocks other than 0 are reached by the stride.
bool strides_matter(std::span<const BlockPair> pairs) noexcept {
  const BlockPair most = blocks_max(pairs);
  return most.from > 0 || most.to > 0;
}

// What is the same for all launches of a job.
struct Plan {
  KernelKind kind;
  std::uint32_t width;
  std::uint32_t leftover_bytes;   // of one byte or value of the tail, as it is read
  TableHeader header;             // but for what each launch has of its own
  std::span<const float> scales;  // one for each strip, or one, or none
};

float scale_of(const Plan& plan, std::size_t strip) noexcept {
  if (plan.scales.empty()) return 1.0f;
  return plan.scales.size() == 1 ? plan.scales[0] : plan.scales[strip];
}

// The strips of one launch, and how many tiles they are of each pair.
struct StripGroup {
  std::size_t first;
  std::size_t count;
  std::uint32_t tiles;

  // Pairs of one launch, by its tiles. Tiles are at least one: a strip is never empty.
  std::size_t pairs_max() const noexcept { return kTilesMax / std::max<std::uint32_t>(1, tiles); }
};

// As many strips from `first` on as one launch takes. At least one: kStripBytesMax.
StripGroup group_of(const Plan& plan, std::span<const PlannedStrip> strips, std::size_t first, std::size_t count_max) {
  StripGroup group{first, 0, 0};
  while (group.count < count_max && first + group.count < strips.size()) {
    const std::uint64_t tiles = group.tiles + tiles_of(strips[first + group.count].bytes / plan.width);
    if (tiles > kTilesMax) break;
    group.tiles = static_cast<std::uint32_t>(tiles);
    ++group.count;
  }
  return group;
}

// Writes header and data of a table. REQUIRES: group.tiles * pairs.size() <= kTilesMax.
void write_table(const Plan& plan, std::span<const PlannedStrip> strips, const StripGroup& group,
                 std::span<const BlockPair> pairs, TableHeader& header, std::byte* data) noexcept {
  std::uint32_t tiles = 0;
  const std::uint64_t tiles_first = tiles_of(strips[group.first].bytes / plan.width);
  bool same = true;
  for (std::size_t k = 0; k < group.count; ++k) {
    const PlannedStrip& strip = strips[group.first + k];
    const std::uint64_t units = strip.bytes / plan.width;
    const DeviceStrip entry{
        address_of(strip.from),
        address_of(strip.to),
        strip.from_stride,
        strip.to_stride,
        units,
        tiles,
        static_cast<std::uint32_t>(strip.bytes % plan.width / plan.leftover_bytes),
        scale_of(plan, group.first + k),
        0,
    };
    std::memcpy(data + k * sizeof(entry), &entry, sizeof(entry));
    same = same && tiles_of(units) == tiles_first;
    tiles += static_cast<std::uint32_t>(tiles_of(units));
  }
  header = plan.header;
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

int launch_plan(const Plan& plan, std::span<const PlannedStrip> strips, std::span<const BlockPair> pairs,
                const TableSpace& space, LaunchFunction launch, void* context) {
  if (strips.empty() || pairs.empty()) return 0;
  const std::size_t whole = table_bytes(strips.size(), pairs.size());
  if (whole > kInlineTableBytes && whole <= space.bytes && space.host != nullptr && space.device != nullptr) {
    const StripGroup all = group_of(plan, strips, 0, strips.size());
    if (all.count == strips.size() && pairs.size() <= all.pairs_max()) {
      TableHeader header;
      write_table(plan, strips, all, pairs, header, space.host);
      return launch(context, {plan.kind, plan.width, &header, space.host, whole, space.device});
    }
  }
  InlineTable<kInlineTableBytes> table;  // only what is used of it is written
  std::byte* data = reinterpret_cast<std::byte*>(table.data);
  for (std::size_t first = 0; first < strips.size();) {
    const StripGroup group = group_of(plan, strips, first, kInlineStripsMax);
    const std::size_t room = (kInlineTableBytes - table_bytes(group.count, 0)) / sizeof(DevicePair);
    const std::size_t pairs_max = std::min(room, group.pairs_max());
    for (std::size_t taken = 0; taken < pairs.size(); taken += pairs_max) {
      const auto some = pairs.subspan(taken, std::min(pairs.size() - taken, pairs_max));
      write_table(plan, strips, group, some, table.header, data);
      const int result =
          launch(context, {plan.kind, plan.width, &table.header, data, table_bytes(group.count, some.size()), nullptr});
      if (result != 0) return result;
    }
    first += group.count;
  }
  return 0;
}

bool fits_whole(std::uint64_t outer, std::uint64_t outer_pitch, std::uint64_t inner, std::uint64_t inner_pitch,
                std::uint64_t row_bytes) noexcept {
  const std::uint64_t inner_extent = (inner - 1) * inner_pitch + row_bytes;
  return (inner == 1 || inner_pitch >= row_bytes) && (outer == 1 || outer_pitch >= inner_extent);
}

std::uint64_t extent_of(const RowShape& rows, bool to) noexcept {
  return (rows.outer - std::uint64_t{1}) * (to ? rows.to_outer_pitch : rows.from_outer_pitch) +
         (rows.inner - std::uint64_t{1}) * (to ? rows.to_inner_pitch : rows.from_inner_pitch) + rows.row_bytes;
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

bool strips_overlap(std::span<const PlannedStrip> strips, std::span<const BlockPair> pairs, std::uint32_t written_part,
                    const RowShape& rows) {
  std::vector<Touched> touched;
  const auto add = [&](std::uint64_t begin, std::uint64_t bytes, bool written) {
    touched.push_back({begin, begin + bytes, written});
  };
  for (const PlannedStrip& strip : strips) {
    for (const BlockPair& pair : pairs) {
      const std::uint64_t from = address_of(strip.from) + pair.from * strip.from_stride;
      const std::uint64_t to = address_of(strip.to) + pair.to * strip.to_stride;
      if (rows.row_bytes == 0) {
        add(from, strip.bytes, false);
        add(to, strip.bytes / written_part, true);
        continue;
      }
      for (std::uint64_t o = 0; o < rows.outer; ++o) {
        for (std::uint64_t i = 0; i < rows.inner; ++i) {
          add(from + o * rows.from_outer_pitch + i * rows.from_inner_pitch, rows.row_bytes, false);
          add(to + o * rows.to_outer_pitch + i * rows.to_inner_pitch, rows.row_bytes, true);
        }
      }
    }
  }
  return any_overlap(touched);
}

template <class Job>
void check_overlap([[maybe_unused]] const Job& job) {
#ifdef KVPOOL_DEBUG
  if (overlaps(job)) refuse("a byte that it writes is read or written by another piece of it");
#endif
}

}  // namespace

void check_job(const CopyJob& job) {
  check_strips(job.strips, job.pairs, [](const PlannedStrip& strip) {
    const std::uint64_t bytes = strip.bytes;
    return std::pair(bytes, bytes);
  });
  check_overlap(job);
}

void check_job(const PermuteJob& job) {
  const RowShape& rows = job.rows;
  if (rows.outer == 0 || rows.inner == 0 || rows.row_bytes == 0) refuse("its rows are empty");
  // Below 2 GiB, so that units and rows can be counted in 31 bits.
  const std::uint64_t count = std::uint64_t{rows.outer} * rows.inner;
  if (count > kTilesMax || count * rows.row_bytes > kTilesMax) refuse("a strip of rows is 2 GiB or longer");
  const std::uint64_t pitch_max =
      std::max({rows.from_outer_pitch, rows.from_inner_pitch, rows.to_outer_pitch, rows.to_inner_pitch});
  if (pitch_max > kAddressMax >> 32) refuse("a pitch is too long");
  const bool apart = fits_whole(rows.outer, rows.to_outer_pitch, rows.inner, rows.to_inner_pitch, rows.row_bytes) ||
                     fits_whole(rows.inner, rows.to_inner_pitch, rows.outer, rows.to_outer_pitch, rows.row_bytes);
  if (!apart) refuse("its rows overlap where they are written");
  check_strips(job.strips, job.pairs,
               [&](const PlannedStrip&) { return std::pair(extent_of(rows, false), extent_of(rows, true)); });
  for (const PlannedStrip& strip : job.strips) {
    if (strip.bytes != count * rows.row_bytes) {
      refuse("a strip has " + std::to_string(strip.bytes) + " bytes and its rows " +
             std::to_string(count * rows.row_bytes));
    }
  }
  check_overlap(job);
}

void check_job(const Fp8Job& job) {
  check_strips(job.strips, job.pairs, [](const PlannedStrip& strip) {
    const std::uint64_t bytes = strip.bytes;
    return std::pair(bytes, bytes / 2);
  });
  const bool several = strides_matter(job.pairs);
  for (const PlannedStrip& strip : job.strips) {
    const std::uint64_t bits = address_of(strip.from) | strip.bytes | (several ? strip.from_stride : 0);
    if (bits % 2 != 0) refuse("16-bit values begin at an odd address, or end at one");
  }
  if (!job.strips.empty() && job.scales.size() != 1 && job.scales.size() != job.strips.size()) {
    refuse("there are " + std::to_string(job.scales.size()) + " scales for " + std::to_string(job.strips.size()) +
           " strips");
  }
  for (const float scale : job.scales) {
    if (!std::isfinite(scale) || scale == 0.0f) refuse("a scale is 0, infinite or no number");
  }
  check_overlap(job);
}

int launch_job(const CopyJob& job, const TableSpace& space, LaunchFunction launch, void* context) {
  check_job(job);
  const bool several = strides_matter(job.pairs);
  const std::uint32_t width =
      width_of(address_bits(job.strips, several, false) | address_bits(job.strips, several, true));
  return launch_plan({KernelKind::kCopy, width, 1, {}, {}}, job.strips, job.pairs, space, launch, context);
}

int launch_job(const PermuteJob& job, const TableSpace& space, LaunchFunction launch, void* context) {
  check_job(job);
  // Walked in the order in which rows are written: neighbours in memory by neighbouring lanes.
  RowShape rows = job.rows;
  if (rows.to_outer_pitch < rows.to_inner_pitch) {
    std::swap(rows.outer, rows.inner);
    std::swap(rows.from_outer_pitch, rows.from_inner_pitch);
    std::swap(rows.to_outer_pitch, rows.to_inner_pitch);
  }
  const bool several = strides_matter(job.pairs);
  std::uint64_t bits = rows.row_bytes;
  if (rows.outer > 1) bits |= rows.from_outer_pitch | rows.to_outer_pitch;
  if (rows.inner > 1) bits |= rows.from_inner_pitch | rows.to_inner_pitch;
  bits |= address_bits(job.strips, several, false) | address_bits(job.strips, several, true);
  Plan plan{KernelKind::kPermute, width_of(bits), 1, {}, {}};
  plan.header.rows = {FastDivider(rows.row_bytes / plan.width),
                      FastDivider(rows.inner),
                      rows.from_outer_pitch,
                      rows.from_inner_pitch,
                      rows.to_outer_pitch,
                      rows.to_inner_pitch};
  return launch_plan(plan, job.strips, job.pairs, space, launch, context);
}

int launch_job(const Fp8Job& job, const TableSpace& space, LaunchFunction launch, void* context) {
  check_job(job);
  const bool several = strides_matter(job.pairs);
  const bool wide =
      address_bits(job.strips, several, false) % 16 == 0 && address_bits(job.strips, several, true) % 8 == 0;
  Plan plan{KernelKind::kToFp8, wide ? 16u : 2u, 2, {}, job.scales};
  plan.header.bfloat16 = job.from == HalfType::kBfloat16 ? 1 : 0;
  return launch_plan(plan, job.strips, job.pairs, space, launch, context);
}

bool overlaps(const CopyJob& job) { return strips_overlap(job.strips, job.pairs, 1, {}); }
bool overlaps(const PermuteJob& job) { return strips_overlap(job.strips, job.pairs, 1, job.rows); }
bool overlaps(const Fp8Job& job) { return strips_overlap(job.strips, job.pairs, 2, {}); }

}  // namespace kvpool::cuda
