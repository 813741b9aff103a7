// Peers: connecting, disconnecting, and borrowing blocks.
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
#include "kvpool/pool/peer_claims.h"
#include "vectors.h"

namespace kvpool::bindings {
namespace {

using namespace py::literals;

// Seconds are checked by kvpool.Settings.
std::int64_t nanoseconds(double seconds) { return static_cast<std::int64_t>(seconds * 1e9); }

// Not as arguments of pybind11, whose TypeError shows all of them, including the secret.
template <class Value>
Value setting(const py::object& settings, const char* name) {
  try {
    return settings.attr(name).cast<Value>();
  } catch (const py::cast_error&) {
    throw_type_error(std::string("the core cannot use the setting ") + name);
  }
}

// Returns notes for the log. A service that joins a cluster is visible to the verbs at once.
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
  options.prefer_unix_socket = setting<bool>(settings, "prefer_unix_socket");
  options.measure_routes = setting<bool>(settings, "measure_routes");
  options.transports.ucx = text_from(ucx, "ucx");
  options.transports.nccl = text_from(nccl, "nccl");
  options.transports.nccl_limits.pass_bytes = setting<std::uint64_t>(settings, "nccl_pass_bytes");
  options.transports.nccl_limits.init_ns = nanoseconds(setting<double>(settings, "nccl_init_s"));
  options.transports.nccl_limits.thread_blocks_max = setting<int>(settings, "nccl_thread_blocks");
  options.transfers_max = setting<std::uint32_t>(settings, "transfers_max");
  options.reserved_max = setting<std::uint32_t>(settings, "reserved_max");
  options.viewed_max = setting<std::uint32_t>(settings, "viewed_max");
  options.received_max = setting<std::uint32_t>(settings, "received_max");
  options.attend_lent_max = setting<std::uint32_t>(settings, "attend_lent_max");
  const GilReleased released;
  return (joins_cluster ? node.start_service(options) : node.prepare_service(options)).notes();
}

// The facts of kvpool.PeerInfo and its parts, by the names of their fields.
py::list failures_of(const PeerInfo& peer) {
  py::list failures;
  for (const auto& [route, report] : peer.route_failures) {
    failures.append(
        py::dict("route"_a = route, "failures"_a = report.failures, "able"_a = report.able, "why"_a = report.why));
  }
  return failures;
}

// Source and target are None for a guess.
py::list prices_of(const PeerInfo& peer) {
  py::list prices;
  for (const auto& [route, between, prior] : peer.route_prices) {
    const auto medium = [](Medium which) { return py::object(py::int_(static_cast<int>(which))); };
    prices.append(py::dict("route"_a = route, "source"_a = between ? medium(between->first) : py::none(),
                           "target"_a = between ? medium(between->second) : py::none(),
                           "latency_us"_a = prior.latency_us, "us_per_piece"_a = prior.us_per_piece,
                           "us_per_byte"_a = prior.us_per_byte));
  }
  return prices;
}

// Bytes by route.
py::dict sent_to(const PeerInfo& peer) {
  py::dict sent;
  for (const auto& [route, bytes] : peer.sent_bytes) sent[py::str(route)] = bytes;
  return sent;
}

// The facts of a kvpool.RecallResult, by the names of its fields.
py::dict recall(PeerNode& node, py::handle peer_argument, py::handle blocks, py::handle count_argument,
                py::handle timeout) {
  const std::string peer(text_from(peer_argument, "peer"));
  std::optional<std::vector<Address>> addresses;
  if (!blocks.is_none()) addresses = addresses_from(blocks).copy();
  const std::size_t count = addresses ? 0 : count_from(count_argument, "blocks");
  const std::int64_t deadline = deadline_from(timeout, node.timeout_ns());
  Service& service = service_of(node);
  RecallResult result;
  call_interruptibly([&](const GivenUp& given_up) {
    const Waiting waiting(deadline, given_up);
    result = addresses ? service.recall(peer, std::move(*addresses), waiting) : service.recall(peer, count, waiting);
  });
  return py::dict("returned"_a = result.returned, "freed"_a = result.freed, "quarantined"_a = result.quarantined);
}

void lend(PeerNode& node, py::handle peer_argument, py::handle blocks, py::handle timeout) {
  const std::string peer(text_from(peer_argument, "peer"));
  std::vector<Address> addresses = addresses_from(blocks).copy();
  const std::int64_t deadline = deadline_from(timeout, node.timeout_ns());
  Service& service = service_of(node);
  call_interruptibly(
      [&](const GivenUp& given_up) { service.lend(peer, std::move(addresses), Waiting(deadline, given_up)); });
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

// The facts of a kvpool.PeerEvent, by the names of its fields; or None. The deadline: seconds of CLOCK_MONOTONIC.
py::object next_peer_event(const PeerNode& node) {
  const std::optional<PeerEvent> event = service_of(node).next_peer_event();
  if (!event) return py::none();
  const bool recalled = event->kind == PeerEvent::Kind::kRecalled;
  return py::dict(
      "name"_a = event->name, "kind"_a = name_of(event->kind), "instance"_a = event->instance,
      "incarnation"_a = event->incarnation, "error"_a = event->why ? exception_from(*event->why) : py::none(),
      "addrs"_a = py::tuple(py::cast(event->recalled)),
      "deadline"_a = recalled ? py::object(py::float_(static_cast<double>(event->deadline_ns) / 1e9)) : py::none());
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
    list.append(py::dict("name"_a = peer.name, "instance"_a = peer.instance, "incarnation"_a = peer.incarnation,
                         "link"_a = peer.link, "routes"_a = py::tuple(py::cast(peer.routes)), "pid"_a = peer.pid,
                         "lent_blocks"_a = peer.lent_blocks, "borrowed_blocks"_a = peer.borrowed_blocks,
                         "reserved_blocks"_a = peer.reserved_blocks, "transfers"_a = peer.transfers,
                         "failing_routes"_a = failures_of(peer), "route_costs"_a = prices_of(peer),
                         "sent_bytes"_a = sent_to(peer), "received_bytes"_a = peer.received_bytes));
  }
  return list;
}

// For each kind of transfer the facts of a kvpool.TransferTotals, by the names of its fields.
py::dict transfer_totals(const PeerNode& node) {
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
    kinds[name] =
        py::dict("succeeded"_a = counts.ended[0], "failed"_a = failed, "bytes"_a = counts.bytes,
                 "seconds"_a = static_cast<double>(counts.duration_ns) / 1e9, "durations"_a = py::tuple(durations));
  }
  return kinds;
}

// As service_of, but also returns a service that is not published yet.
Service& prepared_service_of(PeerNode& node) {
  node.pool().guard_open();
  Service* service = nullptr;
  {
    const GilReleased released;  // another thread may drop a service, and release memory that Python owns
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
    throw Error(ErrorCode::kState, "this pool has no peers: call peers.listen() or peers.connect() first");
  }
  return *service;
}

py::array_t<Address> alloc_at_peer(const PeerNode& node, std::size_t n, MediumChoice medium, bool evict,
                                   py::handle peer_argument, py::handle timeout) {
  const std::string peer(text_from(peer_argument, "instance"));
  const std::int64_t deadline = deadline_from(timeout, node.timeout_ns());
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
            const std::int64_t deadline = deadline_from(timeout, self.timeout_ns());
            Service& service = prepared_service_of(self);
            return call_interruptibly(
                [&](const GivenUp& given_up) { return service.connect(address, {deadline, given_up}, wait); });
          },
          py::arg("address"), py::arg("timeout"), py::arg("wait"))
      .def("_instance", [](PeerNode& self) { return self.pool().instance(); })
      .def("_begin_peer_events", [](PeerNode& self) { return service_of(self).begin_peer_events(); })
      .def("_next_peer_event", &next_peer_event)
      .def("_end_peer_events", [](PeerNode& self) { service_of(self).end_peer_events(); })
      .def_property(
          "_lend_max", [](PeerNode& self) { return self.pool().for_peers().lend_max(); },
          [](PeerNode& self, std::int64_t blocks) {
            self.pool().guard();
            self.pool().for_peers().set_lend_max(blocks);
          })
      .def("_lend", &lend, py::arg("peer"), py::arg("addrs"), py::arg("timeout"))
      .def("_recall", &recall, py::arg("peer"), py::arg("blocks"), py::arg("count"), py::arg("timeout"))
      .def("_peers", &peers)
      .def("_transfer_totals", &transfer_totals)
      .def(
          "_disconnect",
          [](PeerNode& self, py::handle peer_argument) {
            const std::string peer(text_from(peer_argument, "peer"));
            Service& service = service_of(self);
            call_interruptibly([&](const GivenUp& given_up) { service.disconnect(peer, given_up); });
          },
          py::arg("peer"));
}

}  // namespace kvpool::bindings
