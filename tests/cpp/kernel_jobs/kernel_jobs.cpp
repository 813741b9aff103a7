// Random jobs for the kernels, cut into launches by the library's planner, written to standard output for
// tests/python/cuda/test_ptx.py: kernel_jobs SEED JOBS. Numbers are 64 bits long, in the machine's order.
//
//   job       source, its bytes │ destination, its bytes before │ its bytes afterwards │ launches, launch...
//   launch    width │ header and data of the table
//   bytes     length, bytes; `source` and `destination` are addresses
//
// The bytes afterwards are those that the reference makes.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "../fuzz_seeds.h"
#include "kvpool/cuda/kernel_plan.h"
#include "kvpool/cuda/kernels.h"

namespace kvpool::cuda {
namespace {

using testing::Dice;

void put(std::uint64_t number) { std::fwrite(&number, sizeof(number), 1, stdout); }
void put(const void* bytes, std::size_t length) {
  put(length);
  std::fwrite(bytes, 1, length, stdout);
}
void put(const std::vector<std::byte>& bytes) { put(bytes.data(), bytes.size()); }

// Random bytes at an aligned address.
class Buffer {
 public:
  Buffer(std::size_t bytes, Dice& dice)
      : bytes_(bytes), data_(static_cast<std::byte*>(std::aligned_alloc(256, (bytes + 256) / 256 * 256))) {
    for (std::size_t i = 0; i < bytes; ++i) data_[i] = static_cast<std::byte>(dice.any());
  }
  ~Buffer() { std::free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  std::byte* data() const { return data_; }
  std::vector<std::byte> content() const { return {data_, data_ + bytes_}; }

 private:
  std::size_t bytes_;
  std::byte* data_;
};

std::vector<std::uint32_t> shuffled(std::uint32_t blocks, Dice& dice) {
  std::vector<std::uint32_t> order(blocks);
  std::iota(order.begin(), order.end(), 0u);
  for (std::size_t i = blocks; i > 1; --i) std::swap(order[i - 1], order[dice.below(i)]);
  return order;
}

struct Launches {
  std::uint64_t count = 0;
  std::vector<TableHeader> headers;
  std::vector<std::vector<std::byte>> data;
  std::vector<std::uint64_t> widths;
};

int note(void* context, const TableLaunch& launch) {
  auto& launches = *static_cast<Launches*>(context);
  launches.headers.push_back(*launch.header);
  launches.data.emplace_back(launch.data, launch.data + launch.data_bytes);
  launches.widths.push_back(launch.width);
  ++launches.count;
  return 0;
}

// Lengths of strips: short, some of several tiles, often all alike, for which the planner has a divider.
struct Lengths {
  explicit Lengths(Dice& dice) : dice_(dice), same_(dice.one_in(2) ? 1 + dice.below(900) : 0) {}
  std::size_t next() { return same_ != 0 ? same_ : 1 + dice_.below(dice_.one_in(6) ? 2600 : 300); }

 private:
  Dice& dice_;
  std::size_t same_;
};

void make_job(Dice& dice) {
  const std::size_t align = std::size_t{1} << dice.below(5);
  const auto aligned = [&](std::size_t bytes) { return (bytes + align - 1) / align * align; };
  const auto from_blocks = shuffled(1 + dice.below(4), dice);
  const auto to_blocks = shuffled(1 + dice.below(4), dice);
  std::vector<BlockPair> pairs;
  for (std::size_t i = 0; i < std::min(from_blocks.size(), to_blocks.size()); ++i) {
    pairs.push_back({from_blocks[i], to_blocks[i]});
  }
  // Offsets first, because the buffers are as long as their contents.
  struct Part {
    std::size_t from, to, bytes, from_stride, to_stride;
  };
  std::vector<Part> parts;
  Lengths lengths(dice);
  const std::size_t offset = dice.below(2) * align;
  std::size_t from_bytes = offset;
  std::size_t to_bytes = offset;
  for (std::uint32_t left = 1 + dice.below(5); left > 0; --left) {
    const std::size_t bytes = lengths.next();
    const std::size_t from_stride = aligned(bytes + dice.below(40));
    const std::size_t to_stride = aligned(bytes + dice.below(40));
    parts.push_back({from_bytes, to_bytes, bytes, from_stride, to_stride});
    // Nothing behind the last byte of the last block: a kernel that goes on is found.
    from_bytes += (from_blocks.size() - 1) * from_stride + (left > 1 ? from_stride : bytes);
    to_bytes += (to_blocks.size() - 1) * to_stride + (left > 1 ? to_stride : bytes);
  }
  const Buffer from(from_bytes, dice);
  const Buffer to(to_bytes, dice);
  std::vector<PlannedStrip> strips;
  for (const Part& part : parts) {
    strips.push_back({from.data() + part.from, to.data() + part.to, part.bytes, part.from_stride, part.to_stride});
  }
  put(reinterpret_cast<std::uintptr_t>(from.data()));
  put(from.content());
  put(reinterpret_cast<std::uintptr_t>(to.data()));
  put(to.content());
  Launches launches;
  const CopyJob job{strips, pairs};
  static_cast<void>(launch_job(job, {}, note, &launches));
  static_cast<void>(reference_kernels().copy(job, nullptr, {}));
  put(to.content());
  put(launches.count);
  for (std::size_t i = 0; i < launches.count; ++i) {
    put(launches.widths[i]);
    put(&launches.headers[i], sizeof(TableHeader));
    put(launches.data[i]);
  }
}

}  // namespace
}  // namespace kvpool::cuda

int main(int count, char** arguments) {
  if (count != 3) return 2;
  kvpool::testing::Dice dice(std::strtoull(arguments[1], nullptr, 0));
  const auto jobs = std::strtoull(arguments[2], nullptr, 0);
  for (std::uint64_t i = 0; i < jobs; ++i) kvpool::cuda::make_job(dice);
  return std::fflush(stdout) == 0 ? 0 : 1;
}
