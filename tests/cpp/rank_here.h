// A rank of this process with nothing above it, and orders to it: for tests of channels.
#pragma once

#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "endpoint_fixture.h"
#include "kvpool/exec/serial_executor.h"
#include "kvpool/ranks/rank_channels.h"
#include "pool_fixture.h"

namespace kvpool::testing {

inline constexpr std::size_t kPiece = std::size_t{512} << 10;  // a block does not fit into a socket's buffer

struct RankSpec {
  std::vector<std::size_t> pieces = {kPiece};
  bool aggregated = true;
  std::uint32_t dram_blocks = 0;
  int device = -1;  // of its HBM; -1: ordinary memory
  DeviceMemoryKind memory = DeviceMemoryKind::kAuto;
  std::uint32_t instance = 0;  // ranks of several have the same numbers
  std::string listen;          // "": at a new address
};

// A rank as its own process would have it.
struct RankHere {
  RankHere(std::uint32_t number, std::vector<std::string> route_names, const RankSpec& spec = {})
      : number(number),
        incarnation(incarnation_of(spec.instance, number)),
        pool(std::make_shared<Pool>([&] {
          PoolOptions options = small_options(8, spec.dram_blocks);
          options.layout.piece_bytes = spec.pieces;
          options.layout.aggregated = spec.aggregated;
          options.device = spec.device;
          options.device_memory = spec.memory;
          options.pin_dram = spec.device >= 0;
          return options;
        }())),
        memory{pool->layout(), pool->arenas()},
        routes(
            [&] {
              ServiceOptions options;
              options.name = "rank";
              options.secret = "s3cret";
              options.routes = std::move(route_names);
#ifdef KVPOOL_FAKE_CUDA
              options.transports.nccl = fake_nccl_path();
#endif
              return options;
            }(),
            memory, incarnation, executor,
            [this](const void* key, std::function<void()> work) {
              receiving.run(key, Priority::kDecode, std::move(work));
            }),
        reactor(std::make_unique<Reactor>("rank")),
        writer_quarantine(*reactor, watches),
        channels(routes, serial_executor, watches, writer_quarantine) {
    pool->set_instance(number + 1);
    endpoint = std::make_unique<Endpoint>(
        *reactor, EndpointOptions{.secret = "s3cret"}, [this] { return introduce(); },
        [this](const std::shared_ptr<Link>& link, const PeerMetadata& metadata, bool) {
          return channels.admit(link, metadata);
        });
    channels.start(*endpoint);
    channels.on_device_lost([this](const Error&) { device_lost = true; });
    address = endpoint->listen(spec.listen.empty() ? fresh_name("unix:@") : spec.listen);
  }
  ~RankHere() {
    endpoint->close();
    channels.depart_all(Error(ErrorCode::kClosed, "the test is over"), {});
    serial_executor.stop();
    watches.stop();
    receiving.stop();
    reactor->stop();
    writer_quarantine.clear([](const auto& /*party*/, const auto& /*link*/) {});
  }

  Introduction introduce() {
    Introduction own = routes.introduce();
    own.metadata.name = "rank-" + std::to_string(number);
    own.metadata.incarnation = incarnation;
    own.metadata.instance = number + 1;
    own.metadata.rank_of = 7;
    own.metadata.rank = number;
    own.metadata.address = address;
    return own;
  }
  static std::uint64_t incarnation_of(std::uint32_t instance, std::uint32_t number) {
    return 1000 + std::uint64_t{100} * instance + number;
  }
  MetadataRank metadata() const { return {number, incarnation, address}; }
  std::byte* block(std::size_t i) const {
    const Segment& segment = pool->arena(Medium::kHbm)->segments()[0];
    return segment.base + i * segment.stride;
  }
  Address at(std::size_t i) const { return all[i]; }

  const std::uint32_t number;
  const std::uint64_t incarnation;
  std::shared_ptr<Pool> pool;
  const LocalMemory memory;
  Executor executor;
  RouteMaker routes;
  SerialExecutor serial_executor{executor};
  SerialExecutor watches{executor, WriterQuarantine::kWatchLimits};
  SerialExecutor receiving{executor};
  std::unique_ptr<Reactor> reactor;
  WriterQuarantine writer_quarantine;
  RankChannels channels;
  std::string address;
  std::unique_ptr<Endpoint> endpoint;
  std::atomic<bool> device_lost{false};
  const std::vector<Address> all = alloc(*pool, 8);
};

// The outcome of an order.
struct Outcome {
  std::atomic<int> reports{0};
  std::atomic<std::uint64_t> bytes{0};
  std::atomic<int> code{-1};  // of its error
};

struct Order {
  std::vector<ChannelWrite> channels;
  std::vector<Address> from;
  std::vector<Address> to;
};

inline std::shared_ptr<std::atomic<bool>> give(RankHere& rank, std::uint64_t meeting, Order&& given,
                                               const std::shared_ptr<Outcome>& outcome, double seconds = 10,
                                               std::shared_ptr<const DeviceOrder> after = nullptr) {
  const auto kept = std::make_shared<const Order>(std::move(given));
  ChannelOrder order;
  order.meeting = meeting;
  order.channels = kept->channels;
  order.request.from = kept->from;
  order.request.to = kept->to;
  order.request.deadline_ns = in_seconds(seconds);
  order.keep = kept;
  order.after = std::move(after);
  order.stop = std::make_shared<std::atomic<bool>>(false);
  order.report = [outcome](const WriteOutcome& written, const Error* error) {
    outcome->bytes += written.bytes;
    if (error != nullptr) outcome->code = static_cast<int>(error->code());
    ++outcome->reports;
  };
  auto stop = order.stop;
  rank.channels.write(std::move(order));
  return stop;
}

inline ChannelWrite part(std::uint32_t to, std::uint64_t first, std::uint64_t bytes) {
  return {to, bytes, {{first, first, bytes}}};
}

inline int code(ErrorCode code) { return static_cast<int>(code); }

inline MeetBody meeting_of(std::uint64_t number, std::vector<MetadataRank> ranks) {
  return {number, "peer", 0, std::move(ranks)};
}

}  // namespace kvpool::testing
