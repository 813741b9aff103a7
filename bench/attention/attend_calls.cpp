// Calls of attend() and reads of memory, timed, for bench/attention/decode.py. Linked with the core.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <utility>
#include <vector>

#include "kvpool/attention/attend.h"
#include "kvpool/base/copy.h"
#include "kvpool/exec/executor.h"

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Threads for both, which stay for the whole run.
struct Team {
  kvpool::Executor executor;
  kvpool::TaskClass tasks{executor, {8, 16}};
  kvpool::CopyTeam team{8, [this](kvpool::Task task) { return tasks.try_run(std::move(task)); }};
};

Team& team() {
  static Team one;
  return one;
}

struct Read {
  const std::byte* memory;
  std::size_t bytes;  // of each part
  std::uint64_t sums[64];
};

void read_part(void* context, std::size_t part) noexcept {
  Read& read = *static_cast<Read*>(context);
  const auto* words = reinterpret_cast<const std::uint64_t*>(read.memory + part * read.bytes);
  std::uint64_t sums[8] = {};
  for (std::size_t i = 0; i + 8 <= read.bytes / 8; i += 8) {
    __builtin_prefetch(words + i + 128);
    for (std::size_t k = 0; k < 8; ++k) sums[k] += words[i + k];
  }
  for (const std::uint64_t sum : sums) read.sums[part] += sum;
}

}  // namespace

extern "C" {

// Memory in huge pages where the machine gives them; nullptr when there is not enough.
void* attend_memory(std::uint64_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  madvise(memory, bytes, MADV_HUGEPAGE);
  return memory;
}

// Seconds to read all of it, each thread a part in order.
double read_seconds(const void* memory, std::uint64_t bytes, std::uint64_t threads) {
  Read read{static_cast<const std::byte*>(memory), bytes / threads, {}};
  const Clock::time_point start = Clock::now();
  team().team.run_parts(threads, read_part, &read);
  return seconds_since(start);
}

// Seconds of one call, with its results written to `out` in the type of the queries; negative when it is refused.
// Blocks are aggregated, head-major and of 16 tokens; `table` has the block numbers of one sequence after the other.
double attend_seconds(std::uint64_t dtype, std::uint64_t query_heads, std::uint64_t kv_heads, std::uint64_t head_dim,
                      std::uint64_t layers, std::uint64_t layer, const void* memory, const std::uint64_t* table,
                      std::uint64_t batch, std::uint64_t tokens, const void* q, void* out, std::uint64_t threads) {
  const auto type = static_cast<kvpool::DType>(dtype);
  const kvpool::PageFormat format{static_cast<std::uint32_t>(kv_heads), static_cast<std::uint32_t>(head_dim), type,
                                  false, false};
  const std::uint64_t block_bytes = format.row_bytes() * kv_heads * 16 * 2 * layers;
  const std::uint64_t blocks = (tokens + 15) / 16;
  const std::uint64_t row_bytes = query_heads * head_dim * kvpool::dtype_bytes(type);
  std::vector<const std::byte*> places(batch * blocks);
  std::transform(table, table + places.size(), places.begin(),
                 [&](std::uint64_t block) { return static_cast<const std::byte*>(memory) + block * block_bytes; });
  std::vector<kvpool::AttendItem> items(batch);
  for (std::uint64_t i = 0; i < batch; ++i) {
    items[i].k_blocks = items[i].v_blocks = std::span(places).subspan(i * blocks, blocks);
    items[i].range = {0, tokens};
    items[i].q = static_cast<const std::byte*>(q) + i * row_bytes;
    items[i].query_begin = tokens - 1;
  }
  kvpool::AttendCall call;
  call.kv = kvpool::kv_rows(format, 16, static_cast<std::uint32_t>(layer), true);
  call.layer = static_cast<std::uint32_t>(layer);
  call.query_heads = static_cast<std::uint32_t>(query_heads);
  call.query_dtype = type;
  call.items = items;
  try {
    const Clock::time_point start = Clock::now();
    const std::vector<kvpool::PartialAttention> parts = kvpool::attend(call, {&team().team, static_cast<int>(threads)});
    for (std::uint64_t i = 0; i < batch; ++i) {
      parts[i].finish(type, tokens, {static_cast<std::byte*>(out) + i * row_bytes, row_bytes});
    }
    return seconds_since(start);
  } catch (const std::exception&) {
    return -1.0;
  }
}

// The kernel that this processor takes: its instruction set's number.
std::uint64_t attend_kernel() { return static_cast<std::uint64_t>(kvpool::attention_kernels().front()->id.isa); }

}  // extern "C"
