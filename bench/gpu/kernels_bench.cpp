// Measures the kernels against what the CUDA runtime does with the same bytes in the same run. Prints a line of JSON
// for each figure; bench/gpu/speed.py runs it and makes the table.
//
//   kvpool_gpu_bench [--quick] [PART ...]
//
// Rates of the device count bytes read and bytes written, those of the bus the bytes that cross it.
#include <algorithm>
#include <iterator>
#include <string>
#include <vector>

#include "kvpool/cuda/kernels.h"
#include "kvpool/cuda/stream_copier.h"
#include "measure.h"

namespace kvpool::bench {
namespace {

using cuda::BlockPair;
using cuda::CopyJob;
using cuda::KernelSet;
using cuda::LaunchOptions;

constexpr std::size_t kKiB = 1024;
constexpr std::size_t kMiB = 1024 * kKiB;

struct Bench {
  bool quick;
  const KernelSet& kernels;
  Clock clock;
  // Large enough that nothing of one run is in L2 in the next.
  std::size_t device_bytes = quick ? 256 * kMiB : 1024 * kMiB;
  std::size_t bus_bytes = quick ? 64 * kMiB : 256 * kMiB;
  int rounds = quick ? 5 : 15;
};

// As the product launches a kernel: what stays within the GPU has at most so many thread blocks, what crosses the bus
// fewer (stream_copier.h). The whole GPU is a row beside it.
constexpr LaunchOptions kAsProduct{.thread_blocks_max = kLinkThreadBlocks, .table = {}};

void copy(const Bench& bench, const std::vector<PlannedStrip>& strips, const std::vector<BlockPair>& pairs, int stream,
          const LaunchOptions& options = kAsProduct) {
  must(bench.kernels.copy(CopyJob{strips, pairs}, bench.clock.stream(stream), options), "copy kernel");
}

// Slots of `piece` bytes in an arena twice as large, and their places in a run without gaps.
struct Scatter {
  Scatter(std::size_t bytes, std::size_t piece, std::uint64_t seed) : piece_bytes(piece) {
    const auto slots = scattered(bytes / piece, seed);
    for (std::uint32_t k = 0; k < slots.size(); ++k) pairs.push_back({slots[k], k});
    for (const BlockPair& pair : pairs) back.push_back({pair.to, pair.from});
  }
  std::vector<PlannedStrip> strips(const Memory& from, const Memory& to) const {
    return {{from.data(), to.data(), piece_bytes, piece_bytes, piece_bytes}};
  }
  std::size_t piece_bytes;
  std::vector<BlockPair> pairs;  // arena slot, place in the run
  std::vector<BlockPair> back;
};

// That the pieces went where they should: each slot is stamped with its number, and the run is read back.
void check_gather(const Bench& bench, const Scatter& scatter, const Memory& arena, const Memory& run) {
  std::vector<std::uint64_t> stamps(arena.size() / scatter.piece_bytes);
  std::iota(stamps.begin(), stamps.end(), std::uint64_t{1} << 40);
  must(cudaMemcpy2D(arena.data(), scatter.piece_bytes, stamps.data(), 8, 8, stamps.size(), cudaMemcpyDefault),
       "stamps");
  copy(bench, scatter.strips(arena, run), scatter.pairs, 0);
  must(cudaDeviceSynchronize(), "gather");
  std::vector<std::uint64_t> found(scatter.pairs.size());
  must(cudaMemcpy2D(found.data(), 8, run.data(), scatter.piece_bytes, 8, found.size(), cudaMemcpyDefault), "read back");
  for (const BlockPair& pair : scatter.pairs) {
    if (found[pair.to] != stamps[pair.from]) {
      std::fprintf(stderr, "a gather of %zu bytes put a piece where it does not belong\n", scatter.piece_bytes);
      std::exit(1);
    }
  }
}

void bench_device(Bench& bench) {
  const std::size_t bytes = bench.device_bytes;
  const Memory arena(2 * bytes, false);
  const Memory other(2 * bytes, false);
  const Memory run(bytes, false);
  compare_rates(
      bench.clock, bench.rounds, "device copy", bytes, 2 * bytes,
      {{"cudaMemcpyAsync", [&] {
          must(cudaMemcpyAsync(run.data(), arena.data(), bytes, cudaMemcpyDeviceToDevice, bench.clock.stream()),
               "copy");
        }}});
  for (const std::size_t piece : {2 * kKiB, 4 * kKiB, 16 * kKiB, 64 * kKiB, 256 * kKiB, 2 * kMiB}) {
    const Scatter scatter(bytes, piece, 1);
    const Scatter target(bytes, piece, 2);
    check_gather(bench, scatter, arena, run);
    const auto gather = scatter.strips(arena, run);
    const auto scatter_strips = scatter.strips(run, arena);
    const auto swap = scatter.strips(arena, other);
    std::vector<BlockPair> swaps;
    for (std::size_t i = 0; i < scatter.pairs.size(); ++i)
      swaps.push_back({scatter.pairs[i].from, target.pairs[i].from});
    const std::size_t table_bytes = cuda::table_bytes_of(1, swaps.size());
    const Memory table_host(table_bytes, true);
    const Memory table_device(table_bytes, false);
    LaunchOptions table = kAsProduct;
    table.table = {table_host.data(), table_device.data(), table_bytes};
    LaunchOptions whole = table;
    whole.thread_blocks_max = 0;
    const Way ceiling{
        "cudaMemcpyAsync", [&] {
          must(cudaMemcpyAsync(run.data(), arena.data(), bytes, cudaMemcpyDeviceToDevice, bench.clock.stream()),
               "copy");
        }};
    const auto both = [&](const char* what, const auto& strips, const auto& pairs) {
      compare_rates(bench.clock, bench.rounds, what, piece, 2 * bytes,
                    {ceiling,
                     {"kvpool", [&] { copy(bench, strips, pairs, 0, table); }},
                     {"kvpool, no table", [&] { copy(bench, strips, pairs, 0); }},
                     {"kvpool, whole GPU", [&] { copy(bench, strips, pairs, 0, whole); }}});
    };
    both("gather", gather, scatter.pairs);
    both("scatter", scatter_strips, scatter.back);
    both("swap within the device", swap, swaps);
  }
}

// Llama-2-13B in blocks of 16 tokens: 80 pieces of 160 KiB; and of 8 heads of 128: 64 pieces of 32 KiB.
void bench_layouts(Bench& bench) {
  const std::size_t bytes = bench.device_bytes;
  const Memory from(bytes, false);
  const Memory to(bytes, false);
  const auto rate = [&](const char* what, std::size_t piece, std::size_t moved, const std::function<void()>& work) {
    compare_rates(
        bench.clock, bench.rounds, what, piece, moved,
        {{"cudaMemcpyAsync",
          [&] {
            must(cudaMemcpyAsync(to.data(), from.data(), bytes, cudaMemcpyDeviceToDevice, bench.clock.stream()),
                 "copy");
          }},
         {"kvpool", work}});
  };
  struct Model {
    std::size_t pieces;
    std::size_t piece;
    std::uint32_t heads;
  };
  for (const Model& model : {Model{80, 160 * kKiB, 40}, Model{64, 32 * kKiB, 8}}) {
    const std::size_t blocks = bytes / (model.pieces * model.piece);
    std::vector<PlannedStrip> strips;
    for (std::size_t p = 0; p < model.pieces; ++p) {
      strips.push_back({from.data() + p * blocks * model.piece, to.data() + p * model.piece, model.piece, model.piece,
                        model.pieces * model.piece});
    }
    std::vector<BlockPair> pairs;
    for (std::uint32_t k = 0; k < blocks; ++k) pairs.push_back({static_cast<std::uint32_t>(blocks) - 1 - k, k});
    const std::size_t moved = blocks * model.pieces * model.piece;
    // The ceiling's rate is of `bytes`, a little more than what is moved: rates are compared, not times.
    rate("discrete to aggregated", model.piece, 2 * moved, [&] { copy(bench, strips, pairs, 0); });
  }
}

// A call of the runtime for each piece, and, where the runtime has it, one for all.
struct RuntimeCopies {
  RuntimeCopies(const std::vector<PlannedStrip>& strips, const std::vector<BlockPair>& pairs) {
    for (const BlockPair& pair : pairs) {
      for (const PlannedStrip& strip : strips) {
        to.push_back(strip.to + pair.to * strip.to_stride);
        from.push_back(strip.from + pair.from * strip.from_stride);
        bytes.push_back(strip.bytes);
      }
    }
  }
  void one_by_one(cudaStream_t stream) const {
    for (std::size_t i = 0; i < to.size(); ++i) {
      must(cudaMemcpyAsync(to[i], from[i], bytes[i], cudaMemcpyDefault, stream), "copy of a piece");
    }
  }
  void in_batch([[maybe_unused]] cudaStream_t stream) {
#if CUDART_VERSION >= 13000
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    std::size_t first = 0;
    must(cudaMemcpyBatchAsync(to.data(), from.data(), bytes.data(), to.size(), &attributes, &first, 1, stream),
         "batch");
#else
    one_by_one(stream);
#endif
  }
  std::vector<void*> to;
  std::vector<const void*> from;
  std::vector<std::size_t> bytes;
};

void bench_bus(Bench& bench) {
  const std::size_t bytes = bench.bus_bytes;
  const Memory device_in(2 * bytes, false);
  const Memory device_out(2 * bytes, false);
  const Memory host_in(2 * bytes, true);
  const Memory host_out(2 * bytes, true);
  const auto whole = [&](const Memory& to, const Memory& from, int stream) {
    must(cudaMemcpyAsync(to.data(), from.data(), bytes, cudaMemcpyDefault, bench.clock.stream(stream)), "copy");
  };
  for (const std::size_t piece : {4 * kKiB, 16 * kKiB, 64 * kKiB, 256 * kKiB}) {
    const Scatter host(bytes, piece, 3);
    const Scatter device(bytes, piece, 4);
    std::vector<BlockPair> in;
    std::vector<BlockPair> out;
    for (std::size_t i = 0; i < host.pairs.size(); ++i) {
      in.push_back({host.pairs[i].from, device.pairs[i].from});
      out.push_back({device.pairs[i].from, host.pairs[i].from});
    }
    const auto strips_in = host.strips(host_in, device_in);
    const auto strips_out = host.strips(device_out, host_out);
    RuntimeCopies copies_in(strips_in, in);
    RuntimeCopies copies_out(strips_out, out);
    LaunchOptions few;
    for (const std::uint32_t blocks : {8u, 16u, 32u, 64u, 0u}) {
      few.thread_blocks_max = blocks;
      const bool is_product = blocks == kBusThreadBlocks;
      const std::string name = is_product    ? "kvpool"
                               : blocks == 0 ? "kvpool, whole GPU"
                                             : "kvpool, " + std::to_string(blocks) + " thread blocks";
      const auto kernel_in = [&] { copy(bench, strips_in, in, 0, few); };
      const auto kernel_out = [&] { copy(bench, strips_out, out, 1, few); };
      std::vector<Way> ways_in{{name, kernel_in}};
      std::vector<Way> ways_out{{name, kernel_out}};
      std::vector<Way> ways_both{{name, [&] {
                                    kernel_in();
                                    kernel_out();
                                  }}};
      if (is_product) {
        ways_in.insert(ways_in.begin(), {{"cudaMemcpyAsync", [&] { whole(device_in, host_in, 0); }},
                                         {"piece by piece", [&] { copies_in.one_by_one(bench.clock.stream(0)); }},
                                         {"batch", [&] { copies_in.in_batch(bench.clock.stream(0)); }}});
        ways_out.insert(ways_out.begin(), {{"cudaMemcpyAsync", [&] { whole(host_out, device_out, 1); }},
                                           {"piece by piece", [&] { copies_out.one_by_one(bench.clock.stream(1)); }},
                                           {"batch", [&] { copies_out.in_batch(bench.clock.stream(1)); }}});
        ways_both.insert(ways_both.begin(), {{"cudaMemcpyAsync",
                                              [&] {
                                                whole(device_in, host_in, 0);
                                                whole(host_out, device_out, 1);
                                              }},
                                             {"batch",
                                              [&] {
                                                copies_in.in_batch(bench.clock.stream(0));
                                                copies_out.in_batch(bench.clock.stream(1));
                                              }},
                                             {"kvpool out, batch in", [&] {
                                                copies_in.in_batch(bench.clock.stream(0));
                                                kernel_out();
                                              }}});
      }
      const int rounds = piece < 64 * kKiB ? (bench.rounds + 1) / 2 : bench.rounds;
      compare_rates(bench.clock, rounds, "pinned to device", piece, bytes, ways_in);
      compare_rates(bench.clock, rounds, "device to pinned", piece, bytes, ways_out);
      compare_rates(bench.clock, rounds, "both ways", piece, 2 * bytes, ways_both);
    }
  }
}

// Microseconds of each call, and until what it has put into the stream has ended.
std::pair<std::vector<double>, std::vector<double>> wait_times_us(const Bench& bench, int calls,
                                                                  const std::function<void()>& call) {
  std::pair<std::vector<double>, std::vector<double>> times;
  for (int i = 0; i < calls; ++i) {
    const auto started = std::chrono::steady_clock::now();
    const auto since = [&] {
      return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - started).count();
    };
    call();
    times.first.push_back(since());
    must(cudaStreamSynchronize(bench.clock.stream()), "launch");
    times.second.push_back(since());
  }
  return times;
}

// What the calling thread spends, and what passes until little is moved. What is longer than a launch can carry goes by
// a table, and, beside it, as several launches.
void bench_launch(Bench& bench) {
  const std::size_t piece = 2 * kKiB;
  const std::size_t most = 20'000;
  const Memory from(most * piece, false);
  const Memory to(most * piece, false);
  const Memory table_host(cuda::table_bytes_of(80, most), true);
  const Memory table_device(table_host.size(), false);
  const int calls = bench.quick ? 200 : 2000;
  for (const std::size_t strips_count : {1u, 80u}) {
    for (const std::size_t count : {1u, 64u, 1024u, 3000u, 20'000u}) {
      std::vector<PlannedStrip> strips;
      for (std::size_t s = 0; s < strips_count; ++s) {
        strips.push_back({from.data() + 16 * s, to.data() + 16 * s, 16, piece, piece});
      }
      std::vector<BlockPair> pairs;
      for (std::uint32_t k = 0; k < count; ++k) pairs.push_back({k, k});
      const bool is_long = cuda::table_bytes_of(strips_count, count) > cuda::kInlineTableBytes;
      const std::string way = std::to_string(strips_count) + " strips, " + std::to_string(count) + " pairs";
      const auto launch = [&] { copy(bench, strips, pairs, 0); };
      // Of a long one, what it is without a table.
      const char* const call = is_long ? "launches without a table" : "launch";
      print_figures(call, piece, way, "us", call_times_us(calls, bench.clock.stream(), launch));
      print_figures(std::string(call) + " and wait", piece, way, "us", wait_times_us(bench, calls / 10, launch).second);
      if (!is_long) continue;
      // The table is written again only when nothing reads it, so each call is waited for.
      LaunchOptions options = kAsProduct;
      options.table = {table_host.data(), table_device.data(), table_host.size()};
      const auto by_table = wait_times_us(bench, calls / 4, [&] { copy(bench, strips, pairs, 0, options); });
      print_figures("launch", piece, way, "us", by_table.first);
      print_figures("launch and wait", piece, way, "us", by_table.second);
    }
  }
}

}  // namespace
}  // namespace kvpool::bench

// All parts, or those that are named. A part that fails ends the program, so
// to measure the others all the same, run each part separately.
int main(int argc, char** argv) {
  using namespace kvpool::bench;
  struct Part {
    const char* name;
    void (*run)(Bench& bench);
  };
  constexpr Part kParts[] = {
      {"device", bench_device}, {"layouts", bench_layouts}, {"bus", bench_bus}, {"launch", bench_launch}};
  bool quick = false;
  std::vector<std::string> named;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--quick") {
      quick = true;
      continue;
    }
    const auto is_it = [&](const Part& part) { return argument == part.name; };
    if (std::none_of(std::begin(kParts), std::end(kParts), is_it)) {
      std::fprintf(stderr, "there is no part %s\n", argument.c_str());
      return 2;
    }
    named.push_back(argument);
  }
  int devices = 0;
  const cudaError_t result = cudaGetDeviceCount(&devices);
  if (result != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "no CUDA GPU: %s\n", cudaGetErrorString(result));
    return 77;
  }
  cudaDeviceProp device;
  must(cudaGetDeviceProperties(&device, 0), "properties");
  int driver = 0;
  must(cudaDriverGetVersion(&driver), "version");
  std::printf(
      "{\"device\": \"%s\", \"sm\": %d, \"multiprocessors\": %d, \"l2_mib\": %d, \"driver\": %d, \"kernels\": "
      "\"%s\"}\n",
      device.name, 10 * device.major + device.minor, device.multiProcessorCount, device.l2CacheSize >> 20, driver,
      kvpool::cuda::kernel_targets());
  std::fflush(stdout);
  Bench bench{quick, *kvpool::cuda::gpu_kernels(), {}};
  for (const Part& part : kParts) {
    if (named.empty() || std::find(named.begin(), named.end(), part.name) != named.end()) part.run(bench);
  }
  return 0;
}
