// Peers: meeting them, parting from them, and blocks that they lend.
#include "service.h"

#include <pybind11/stl.h>
#include <unistd.h>

#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bind.h"
#include "kvpool/net/connect/endpoint.h"

namespace kvpool::bindings {
namespace {

// Seconds are checked by kvpool.Settings.
std::int64_t nanoseconds(double seconds) { return static_cast<std::int64_t>(seconds * 1e9); }

// Not by pybind11's arguments: what does not fit them it shows in its TypeError, and the secret is one of them.
template <class Value>
Value setting(const py::object& settings, const char* name) {
  try {
    return settings.attr(name).cast<Value>();
  } catch (const py::cast_error&) {
    throw_type_error(std::string("the core cannot use the setting ") + name);
  }
}

// Returns what a log should say of it. One that joins a cluster is seen by the verbs at once.
std::vector<std::string> start_service(PeerNode& node, const py::object& settings, py::handle ucx, py::handle nccl,
                                       bool joins_cluster) {
  ServiceOptions options;
  options.joins_cluster = joins_cluster;
  options.name = setting<std::string>(settings, "name");
  options.secret = setting<std::string>(settings, "secret");
  options.model = setting<std::string>(settings, "model");
  options.routes = setting<std::vector<std::string>>(settings, "routes");
  options.lease_ns = nanoseconds(setting<double>(settings, "lease_s"));
  options.reserve_max_ns = nanoseconds(setting<double>(settings, "reserve_max_s"));
  options.worker_threads = setting<int>(settings, "transfer_threads");
  options.trusted_network = setting<bool>(settings, "trusted_network");
  options.unix_door = setting<bool>(settings, "unix_door");
  options.measure_routes = setting<bool>(settings, "measure_routes");
  options.transports.ucx = text_from(ucx, "ucx");
  options.transports.nccl = text_from(nccl, "nccl");
  options.transports.nccl_limits.pass_bytes = setting<std::uint64_t>(settings, "nccl_pass_bytes");
  options.transports.nccl_limits.init_ns = nanoseconds(setting<double>(settings, "nccl_init_s"));
  options.transports.nccl_limits.thread_blocks_max = setting<int>(settings, "nccl_thread_blocks");
  options.transfers_max = setting<std::uint32_t>(settings, "transfers_max");
  options.reserved_max = setting<std::uint32_t>(settings, "reserved_max");
  options.received_max = setting<std::uint32_t>(settings, "received_max");
  const GilReleased released;
  return (joins_cluster ? node.start_service(options) : node.prepare_service(options)).notes();
}

// (route, failures, able, why) of each.
py::tuple failures_of(const PeerInfo& peer) {
  py::tuple failures(peer.route_failures.size());
  for (std::size_t i = 0; i < peer.route_failures.size(); ++i) {
    const auto& [route, report] = peer.route_failures[i];
    failures[i] = py::make_tuple(route, report.failures, report.able, report.why);
  }
  return failures;
}

// (route, source, target, latency in us, us per piece, us per byte) of each; source and target are 0 for a guess.
py::tuple prices_of(const PeerInfo& peer) {
  py::tuple prices(peer.route_prices.size());
  for (std::size_t i = 0; i < peer.route_prices.size(); ++i) {
    const auto& [route, between, prior] = peer.route_prices[i];
    const int source = between ? static_cast<int>(between->first) : 0;
    const int target = between ? static_cast<int>(between->second) : 0;
    prices[i] = py::make_tuple(route, source, target, prior.latency_us, prior.us_per_piece, prior.us_per_byte);
  }
  return prices;
}

// (returned, freed, quarantined).
py::tuple recall(PeerNode& node, py::handle peer_argument, py::handle blocks, py::handle count_argument,
                 py::handle timeout) {
  const std::string peer(text_from(peer_argument, "peer"));
  std::optional<std::vector<Address>> addresses;
  if (!blocks.is_none()) addresses = addresses_from(blocks).copy();
  const std::size_t count = addresses ? 0 : count_from(count_argument, "blocks");
  const std::int64_t deadline = deadline_from(timeout, kTimeoutNs);
  Service& service = service_of(node);
  RecallResult result;
  call_interruptibly([&](const GivenUp& given_up) {
    const Waiting waiting(deadline, given_up);
    result = addresses ? service.recall(peer, std::move(*addresses), waiting) : service.recall(peer, count, waiting);
  });
  return py::make_tuple(result.returned, result.freed, result.quarantined);
}

const char* name_of(PeerEvent::Kind kind) noexcept {
  switch (kind) {
    case PeerEvent::Kind::kJoined:
      return "joined";
    case PeerEvent::Kind::kLost:
      return "lost";
    default:
      return "recalled";
  }
}

// (name, kind, instance, epoch, error, recalled addresses, their deadline in seconds of CLOCK_MONOTONIC), or None.
py::object next_peer_event(const PeerNode& node) {
  const std::optional<PeerEvent> event = service_of(node).next_peer_event();
  if (!event) return py::none();
  const bool recalled = event->kind == PeerEvent::Kind::kRecalled;
  return py::make_tuple(event->name, name_of(event->kind), event->instance, event->epoch,
                        event->why ? exception_from(*event->why) : py::object(py::none()),
                        py::tuple(py::cast(event->recalled)),
                        recalled ? py::object(py::float_(static_cast<double>(event->deadline_ns) / 1e9)) : py::none());
}

py::list peers(const PeerNode& node) {
  std::vector<PeerInfo> peers;
  {
    Service& service = service_of(node);
    const GilReleased released;
    peers = service.peers();
  }
  py::list list;
  for (const PeerInfo& peer : peers) {
    list.append(py::make_tuple(peer.name, peer.instance, peer.epoch, peer.link, py::tuple(py::cast(peer.routes)),
                               peer.pid, peer.lent_blocks, peer.borrowed_blocks, peer.reserved_blocks, peer.transfers,
                               failures_of(peer), prices_of(peer)));
  }
  return list;
}

// For each kind of transfer: how many ended how, by the name of the error; bytes; seconds together; how many took how
// long.
py::dict transfer_counts(const PeerNode& node) {
  Service& service = service_of(node);
  py::dict kinds;
  for (const auto& [kind, name] : {std::pair(TransferKind::kSend, "send"), std::pair(TransferKind::kFetch, "fetch")}) {
    const TransferTally::Counts counts = service.transfer_counts(kind);
    py::dict failed;
    for (std::size_t i = 1; i < counts.ended.size(); ++i) {
      if (counts.ended[i] != 0) failed[class_of(static_cast<ErrorCode>(i - 1))] = counts.ended[i];
    }
    py::list durations;
    for (std::size_t i = 0; i < counts.durations.size(); ++i) {
      const bool bounded = i < TransferTally::kBoundsNs.size();
      const double bound_s =
          bounded ? static_cast<double>(TransferTally::kBoundsNs[i]) / 1e9 : std::numeric_limits<double>::infinity();
      durations.append(py::make_tuple(bound_s, counts.durations[i]));
    }
    kinds[name] = py::make_tuple(counts.ended[0], failed, counts.bytes, static_cast<double>(counts.duration_ns) / 1e9,
                                 py::tuple(durations));
  }
  return kinds;
}

// As service_of, and of one that is not published yet.
Service& prepared_service_of(PeerNode& node) {
  node.pool().guard_open();
  Service* service = nullptr;
  {
    const GilReleased released;  // another thread may drop a service, and let go of memory that is Python's
    service = node.prepared_service();
  }
  if (service == nullptr) throw Error(ErrorCode::kState, "this pool has no service: start it first");
  return *service;
}

}  // namespace

GivenUp asks_for_signals() {
  constexpr std::int64_t kEveryNs = 50'000'000;
  // Costs nothing before somebody waits, and asks.
  return [next_ns = std::int64_t{0}]() mutable {
    if (steady_ns() < next_ns || gettid() != getpid()) return false;
    if (next_ns == 0) {
      next_ns = steady_ns() + kEveryNs;
      return false;
    }
    const PyGILState_STATE gil = PyGILState_Ensure();
    const bool raised = PyErr_CheckSignals() != 0;  // what was raised stays with this thread
    PyGILState_Release(gil);
    next_ns = steady_ns() + kEveryNs;
    return raised;
  };
}

Service& service_of(const PeerNode& node) {
  node.pool().guard_open();
  Service* service = node.service();
  if (service == nullptr) {
    throw Error(ErrorCode::kState, "this pool has no peers: call listen() or connect() first");
  }
  return *service;
}

py::array_t<Address> alloc_at_peer(const PeerNode& node, std::size_t n, MediumChoice medium, bool evict,
                                   py::handle peer_argument, py::handle timeout) {
  const std::string peer(text_from(peer_argument, "instance"));
  const std::int64_t deadline = deadline_from(timeout, kTimeoutNs);
  Service& service = service_of(node);
  const std::vector<Address> addresses = call_interruptibly(
      [&](const GivenUp& given_up) { return service.alloc(peer, n, medium, evict, {deadline, given_up}); });
  return to_array(addresses.data(), addresses.size());
}

void bind_service(py::module_& module, PoolClass& pool) {
  module.def("_check_listen_address", [](py::handle address, bool has_secret) {
    check_listen_address(std::string(text_from(address, "address")), has_secret);
  });
  module.def("_check_connect_address", [](py::handle address, bool has_secret) {
    check_connect_address(std::string(text_from(address, "address")), has_secret);
  });
  pool.def("_start_service", &start_service, py::arg("settings"), py::arg("ucx"), py::arg("nccl"),
           py::arg("joins_cluster") = false)
      .def("_publish_service",
           [](PeerNode& self) {
             const GilReleased released;
             self.publish_service();
           })
      .def("_name",
           [](PeerNode& self) -> py::object {
             self.pool().guard_open();
             const Service* service = self.service();
             return service == nullptr ? py::none() : py::object(py::str(service->options().name));
           })
      .def(
          "_listen",
          [](PeerNode& self, py::handle address_argument) {
            const std::string address(text_from(address_argument, "address"));
            Service& service = prepared_service_of(self);
            const GilReleased released;
            return service.listen(address);
          },
          py::arg("address"))
      .def(
          "_connect",
          [](PeerNode& self, py::handle address_argument, py::handle timeout, bool wait) {
            const std::string address(text_from(address_argument, "address"));
            const std::int64_t deadline = deadline_from(timeout, kTimeoutNs);
            Service& service = prepared_service_of(self);
            return call_interruptibly(
                [&](const GivenUp& given_up) { return service.connect(address, {deadline, given_up}, wait); });
          },
          py::arg("address"), py::arg("timeout"), py::arg("wait"))
      .def("_begin_peer_events", [](PeerNode& self) { return service_of(self).begin_peer_events(); })
      .def("_next_peer_event", &next_peer_event)
      .def("_end_peer_events", [](PeerNode& self) { service_of(self).end_peer_events(); })
      .def("_recall", &recall, py::arg("peer"), py::arg("blocks"), py::arg("count"), py::arg("timeout"))
      .def("_peers", &peers)
      .def("_transfer_counts", &transfer_counts)
      .def(
          "disconnect",
          [](PeerNode& self, py::handle peer_argument) {
            const std::string peer(text_from(peer_argument, "peer"));
            Service& service = service_of(self);
            call_interruptibly([&](const GivenUp& given_up) { service.disconnect(peer, given_up); });
          },
          py::arg("peer"), R"(Parts from a peer.

Transfers with it that are under way end with PeerLost on both sides; blocks that it had lent are given back, and
those that it borrowed or reserved are free again as soon as it can write to them no more. Ctrl-C ends the wait for
that. Releases the GIL.

Args:
    peer: Its name.

Raises:
    PeerLost: There is no such peer.)");
}

}  // namespace kvpool::bindings
