// How often a byte is copied on its way from one pool to another, by every route and between all places for blocks:
// never more often than the route has to. The chosen route has the fewest copies, or as few as another.
#include <doctest/doctest.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "copy_count.h"
#include "fake_nccl.h"
#include "joined_service.h"
#include "kvpool/arena/device_arena.h"
#include "kvpool/base/error.h"
#include "pool_fixture.h"

#ifdef KVPOOL_FAKE_CUDA

namespace kvpool::testing {
namespace {

constexpr std::uint32_t kBlocks = 4;      // of each medium
constexpr std::size_t kSent = 3;          // blocks of a transfer
constexpr std::size_t kPiece = 32 << 10;  // two a block
constexpr std::uint64_t kContent = kSent * 2 * kPiece;

// Where blocks can be. An engine's are adopted: its two layers are not in a row.
enum Place : std::uint8_t { kOnGpu, kEngineGpu, kPinnedDram, kOnHost, kEngineHost, kPlainDram, kPlaceCount };
const std::array<std::string, kPlaceCount> kPlaceNames{"a GPU",        "a GPU, an engine's", "DRAM of a pool on a GPU",
                                                       "HBM on a CPU", "HBM, an engine's",   "DRAM"};
constexpr bool has_gpu(Place place) { return place == kOnGpu || place == kEngineGpu || place == kPinnedDram; }
constexpr bool is_engines(Place place) { return place == kEngineGpu || place == kEngineHost; }
constexpr Medium medium_in(Place place) {
  return place == kPinnedDram || place == kPlainDram ? Medium::kDram : Medium::kHbm;
}

// "g": by a GPU, its copy engines or kernels; "c": by the CPU; "l": by Linux, in a system call; "n": by NCCL. "gllg" is
// out of a GPU, into a socket, out of it, and into a GPU. "": the route does not go there.
struct Way {
  std::string route;
  // From the row's place to the column's, in the order of Place.
  std::array<std::array<const char*, kPlaceCount>, kPlaceCount> copies;
};

// What a route has to do: `loopback`, `shm`, `cma` and `cuda_ipc` copy once, by a side that reaches both: the
// sender's GPU, or, where neither side is on one, the CPU. What goes by a socket is copied twice by Linux, and out of a
// GPU before, and into one afterwards. NCCL moves what lies in a row on a GPU to a row on another: an engine's layers
// and DRAM are gathered before, and scattered afterwards.
// clang-format off
const std::array<Way, 6> kWays{{
    //  to a GPU  engine's  pinned    HBM       engine's  DRAM
    {"loopback",
     {{{"g",      "g",      "g",      "",       "",       ""},
       {"g",      "g",      "g",      "",       "",       ""},
       {"g",      "g",      "c",      "c",      "c",      "c"},
       {"",       "",       "c",      "c",      "c",      "c"},
       {"",       "",       "c",      "c",      "c",      "c"},
       {"",       "",       "c",      "c",      "c",      "c"}}}},
    {"shm",
     {{{"",       "",       "",       "",       "",       ""},
       {"",       "",       "",       "",       "",       ""},
       {"",       "",       "c",      "c",      "",       "c"},
       {"",       "",       "c",      "c",      "",       "c"},
       {"",       "",       "c",      "c",      "",       "c"},
       {"",       "",       "c",      "c",      "",       "c"}}}},
    {"cma",
     {{{"",       "",       "",       "",       "",       ""},
       {"",       "",       "",       "",       "",       ""},
       {"",       "",       "l",      "l",      "l",      "l"},
       {"",       "",       "l",      "l",      "l",      "l"},
       {"",       "",       "l",      "l",      "l",      "l"},
       {"",       "",       "l",      "l",      "l",      "l"}}}},
    {"cuda_ipc",
     {{{"g",      "",       "g",      "g",      "",       "g"},
       {"g",      "",       "g",      "g",      "",       "g"},
       {"g",      "",       "c",      "c",      "",       "c"},
       {"",       "",       "",       "",       "",       ""},
       {"",       "",       "",       "",       "",       ""},
       {"",       "",       "",       "",       "",       ""}}}},
    {"sock",
     {{{"gllg",   "gllg",   "gll",    "gll",    "gll",    "gll"},
       {"gllg",   "gllg",   "gll",    "gll",    "gll",    "gll"},
       {"llg",    "llg",    "ll",     "ll",     "ll",     "ll"},
       {"llg",    "llg",    "ll",     "ll",     "ll",     "ll"},
       {"llg",    "llg",    "ll",     "ll",     "ll",     "ll"},
       {"llg",    "llg",    "ll",     "ll",     "ll",     "ll"}}}},
    {"nccl",
     {{{"n",      "ng",     "ng",     "",       "",       ""},
       {"gn",     "gng",    "gng",    "",       "",       ""},
       {"gn",     "gng",    "gng",    "",       "",       ""},
       {"",       "",       "",       "",       "",       ""},
       {"",       "",       "",       "",       "",       ""},
       {"",       "",       "",       "",       "",       ""}}}},
}};
// clang-format on

// How often each kind of copy was made of the whole content.
struct Copies {
  std::uint64_t by_gpu = 0;
  std::uint64_t by_cpu = 0;
  std::uint64_t by_linux = 0;
  std::uint64_t by_nccl = 0;

  static Copies of(const std::string& cell) {
    const auto times = [&](char kind) {
      return static_cast<std::uint64_t>(std::count(cell.begin(), cell.end(), kind));
    };
    return {times('g'), times('c'), times('l'), times('n')};
  }
  std::uint64_t all() const { return by_gpu + by_cpu + by_linux + by_nccl; }
  std::string text() const {
    return std::string(by_gpu, 'g') + std::string(by_cpu, 'c') + std::string(by_linux, 'l') + std::string(by_nccl, 'n');
  }
};

class World {
 public:
  World() { cuda_.set("delay_us", 0); }

  // What `work` copies, in whole contents. What is less than half of one is not: messages, and the beginning of what a
  // socket has read ahead, which the CPU puts into its place.
  template <class Work>
  Copies count(const Work& work) const {
    const std::uint64_t by_gpu = cuda_.count("bytes copied");
    const std::uint64_t by_nccl = nccl_.count("bytes sent");
    const CopyCount counting;
    work();
    return {whole(cuda_.count("bytes copied") - by_gpu), whole(counting.by_cpu()), whole(counting.by_linux()),
            whole(nccl_.count("bytes sent") - by_nccl)};
  }

 private:
  static std::uint64_t whole(std::uint64_t bytes) {
    CHECK(bytes % kContent < kContent / 2);
    return bytes / kContent;
  }

  const FakeCuda cuda_;
  const FakeNccl nccl_;
};

// A pool that has blocks in this place, with its peers.
class Side {
 public:
  Side(const std::string& name, Place place, int device) : pool_(make_pool(place, device)), node_(pool_, make_ranks) {
    ServiceOptions options;
    options.name = name;
    options.secret = "s3cret";
    for (const Way& way : kWays) {
      if (way.route != "nccl" || has_gpu(place)) options.routes.push_back(way.route);
    }
    options.transports.nccl = fake_nccl_path();
    options.measure_routes = false;  // costs are the estimates of each route
    service_ = &node_.start_service(options);
  }
  ~Side() { pool_->close(); }
  Side(const Side&) = delete;
  Side& operator=(const Side&) = delete;

  Pool& pool() const { return *pool_; }
  Service& service() const { return *service_; }

 private:
  static std::shared_ptr<Pool> make_pool(Place place, int device) {
    PoolOptions options = small_options(is_engines(place) ? 0 : kBlocks, kBlocks);
    options.layout.piece_bytes = {kPiece, kPiece};
    options.layout.aggregated = !is_engines(place);
    options.audit = true;
    if (has_gpu(place)) {
      options.device = device;
      options.pin_dram = true;
    }
    if (place == kEngineGpu) {
      const auto engine = std::make_shared<DeviceArena>(
          DeviceArenaOptions{.blocks = kBlocks, .segment_bytes = {kPiece, kPiece}, .device = device});
      options.adopted_hbm = AdoptedMemory{kBlocks, engine->segments(), engine, device};
    } else if (place == kEngineHost) {
      const auto engine = std::make_shared<std::vector<std::byte>>(2 * kBlocks * kPiece);
      const std::vector<Segment> layers{{engine->data(), kPiece, kPiece},
                                        {engine->data() + kBlocks * kPiece, kPiece, kPiece}};
      options.adopted_hbm = AdoptedMemory{kBlocks, layers, engine, -1};
    }
    return std::make_shared<Pool>(options);
  }

  const std::shared_ptr<Pool> pool_;
  PeerNode node_;
  Service* service_ = nullptr;
};

struct Sent {
  std::string route;  // "": by none
  Copies copies;
};

// A transfer by this route, or, if it is "", by the one that is chosen.
Sent send(const World& world, const Side& from, Place from_place, const Side& to, Place to_place,
          const std::string& route) {
  const Addresses source = alloc(from.pool(), kSent, medium_in(from_place));
  for (std::size_t i = 0; i < kSent; ++i) stamp(from.pool(), source[i], 70 + i);
  Sent sent;
  std::shared_ptr<Transfer> transfer;
  sent.copies = world.count([&] {
    TransferRequest request;
    request.peer = "there";
    request.from = source;
    request.medium = medium_in(to_place);
    request.route = route;
    request.deadline_ns = real_seconds(30);
    try {
      transfer = from.service().transfer(std::move(request));
      REQUIRE(transfer->wait(real_seconds(40)));
      transfer->rethrow_if_failed();
    } catch (const Error& error) {
      CHECK_MESSAGE(error.code() == ErrorCode::kUnsupported, error.what());
      transfer.reset();
    }
  });
  from.pool().free(source.data(), source.size());
  if (transfer == nullptr) return sent;
  sent.route = transfer->stats().route;
  const std::vector<Address> got = transfer->addresses();
  REQUIRE(got.size() == kSent);
  for (std::size_t i = 0; i < kSent; ++i) CHECK(has_stamp(to.pool(), got[i], 70 + i));
  to.pool().free(got.data(), got.size());
  return sent;
}

TEST_CASE("copies of each kind are counted, and an intermediate stop would be") {
  const World world;
  std::vector<std::byte> from(kContent);
  std::vector<std::byte> to(kContent);
  CHECK(world.count([] {}).text() == "");
  volatile std::size_t bytes = kContent;  // so that no compiler knows it
  CHECK(world.count([&] { std::memcpy(to.data(), from.data(), bytes); }).text() == "c");
  CHECK(world.count([&] { std::memmove(to.data(), from.data(), bytes); }).text() == "c");
  int ends[2];
  REQUIRE(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
  iovec piece{from.data(), 4096};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  CHECK(world
            .count([&] {
              for (std::size_t at = 0; at < kContent; at += 4096) {
                CHECK(sendmsg(ends[0], &message, 0) == 4096);
                CHECK(recv(ends[1], to.data(), 4096, MSG_WAITALL) == 4096);
              }
            })
            .text() == "ll");
  close(ends[0]);
  close(ends[1]);
  const auto context = CudaContext::retain(0, "a test");
  const CurrentContext current(*context, "a test");
  CuPointer memory = 0;
  REQUIRE(context->driver().mem_alloc(&memory, kContent) == 0);
  CHECK(world
            .count([&] {
              const auto source = static_cast<CuPointer>(reinterpret_cast<std::uintptr_t>(from.data()));
              CHECK(context->driver().memcpy_async(memory, source, kContent, nullptr) == 0);
              CHECK(context->driver().stream_synchronize(nullptr) == 0);
            })
            .text() == "g");
  CHECK(context->driver().mem_free(memory) == 0);
}

// As the table has it, but that pools of one GPU have no use for NCCL, and that an engine's memory on another GPU of
// the same process is not reached: a handle of it is for other processes, and access from here is the engine's to give.
Copies expected_of(const Way& way, Place from, Place to, bool same_gpu) {
  if (same_gpu ? way.route == "nccl" : way.route == "loopback" && to == kEngineGpu) return {};
  return Copies::of(way.copies[from][to]);
}

void check_ways(const World& world, Place from, Place to, bool same_gpu) {
  CAPTURE(kPlaceNames[from]);
  CAPTURE(kPlaceNames[to]);
  CAPTURE(same_gpu);
  const Side here("here", from, 0);
  const Side there("there", to, same_gpu ? 0 : 1);
  REQUIRE(here.service().connect(there.service().listen(unix_address()), real_seconds(20)) == "there");
  // First the choice while only estimates of the routes are known. NCCL is for large content, and a route
  // that has to get ready, by pinning the peer's memory, say, is chosen as soon as it is.
  std::uint64_t fewest = ~std::uint64_t{0};
  for (const Way& way : kWays) {
    const std::uint64_t copies = expected_of(way, from, to, same_gpu).all();
    if (copies > 0 && way.route != "nccl") fewest = std::min(fewest, copies);
  }
  Sent chosen;
  const std::int64_t until = real_seconds(20);
  do chosen = send(world, here, from, there, to, "");
  while (chosen.copies.all() != fewest && monotonic_ns() < until);
  {
    CAPTURE(chosen.route);
    CHECK(chosen.copies.all() == fewest);
  }
  for (const Way& way : kWays) {
    if (same_gpu && way.route == "nccl") continue;
    CAPTURE(way.route);
    const Copies expected = expected_of(way, from, to, same_gpu);
    const Sent sent = send(world, here, from, there, to, way.route);
    CHECK(sent.route == (expected.all() == 0 ? std::string() : way.route));
    CHECK(sent.copies.text() == expected.text());
  }
}

TEST_CASE("each route makes the fewest copies that it can, and one with the fewest is chosen") {
  const World world;
  for (std::uint8_t from = 0; from < kPlaceCount; ++from) {
    for (std::uint8_t to = 0; to < kPlaceCount; ++to) {
      const auto source = static_cast<Place>(from);
      const auto target = static_cast<Place>(to);
      check_ways(world, source, target, /*same_gpu=*/false);
      if (has_gpu(source) && has_gpu(target)) check_ways(world, source, target, /*same_gpu=*/true);
    }
  }
}

}  // namespace
}  // namespace kvpool::testing

#endif  // KVPOOL_FAKE_CUDA
