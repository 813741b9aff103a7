// Peers: meeting them, parting from them, and blocks that they lend.
#include "service.h"

#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "bind.h"

namespace kvpool::bindings {
namespace {

// Seconds are checked by kvpool.Settings.
std::int64_t nanoseconds(double seconds) { return static_cast<std::int64_t>(seconds * 1e9); }

void start_service(Pool& pool, const std::string& name, const std::string& secret, const std::string& model,
                   std::vector<std::string> routes, double lease_s, double reserve_s, int transfer_threads,
                   bool trusted_network, bool unix_door, const std::string& ucx, std::uint32_t transfers_max,
                   std::uint32_t reserved_max, std::uint32_t received_max) {
  ServiceOptions options;
  options.name = name;
  options.secret = secret;
  options.model = model;
  options.routes = std::move(routes);
  options.lease_ns = nanoseconds(lease_s);
  options.reserve_ns = nanoseconds(reserve_s);
  options.worker_threads = transfer_threads;
  options.trusted_network = trusted_network;
  options.unix_door = unix_door;
  options.ucx = ucx;
  options.transfers_max = transfers_max;
  options.reserved_max = reserved_max;
  options.received_max = received_max;
  const GilReleased released;
  pool.start_service(options);
}

py::list peers(Pool& pool) {
  std::vector<PeerInfo> peers;
  {
    Service& service = service_of(pool);
    const GilReleased released;
    peers = service.peers();
  }
  py::list list;
  for (const PeerInfo& peer : peers) {
    list.append(py::make_tuple(peer.name, peer.instance, peer.epoch, peer.link, py::tuple(py::cast(peer.routes)),
                               peer.pid, peer.lent_blocks, peer.borrowed_blocks, peer.reserved_blocks));
  }
  return list;
}

}  // namespace

Service& service_of(Pool& pool) {
  pool.guard();
  Service* service = pool.service();
  if (service == nullptr) {
    throw Error(ErrorCode::kState, "this pool has no peers: call listen() or connect() first");
  }
  return *service;
}

py::array_t<Address> alloc_at_peer(Pool& pool, std::size_t n, Medium medium, bool evict, py::handle peer_argument,
                                   py::handle timeout) {
  const std::string peer(text_from(peer_argument, "instance"));
  const std::int64_t deadline = deadline_from(timeout, kTimeoutNs);
  std::vector<Address> addresses;
  {
    Service& service = service_of(pool);
    const GilReleased released;
    addresses = service.alloc(peer, n, medium, evict, deadline);
  }
  return to_array(addresses.data(), addresses.size());
}

void bind_service(py::module_& /*module*/, PoolClass& pool) {
  pool.def("_start_service", &start_service, py::kw_only(), py::arg("name"), py::arg("secret"), py::arg("model"),
           py::arg("routes"), py::arg("lease_s"), py::arg("reserve_s"), py::arg("transfer_threads"),
           py::arg("trusted_network"), py::arg("unix_door"), py::arg("ucx"), py::arg("transfers_max"),
           py::arg("reserved_max"), py::arg("received_max"))
      .def("_name",
           [](Pool& self) -> py::object {
             self.guard();
             const Service* service = self.service();
             return service == nullptr ? py::none() : py::object(py::str(service->options().name));
           })
      .def(
          "_listen",
          [](Pool& self, py::handle address_argument) {
            const std::string address(text_from(address_argument, "address"));
            Service& service = service_of(self);
            const GilReleased released;
            return service.listen(address);
          },
          py::arg("address"))
      .def(
          "_connect",
          [](Pool& self, py::handle address_argument, py::handle timeout) {
            const std::string address(text_from(address_argument, "address"));
            const std::int64_t deadline = deadline_from(timeout, kTimeoutNs);
            Service& service = service_of(self);
            const GilReleased released;
            return service.connect(address, deadline);
          },
          py::arg("address"), py::arg("timeout"))
      .def("_peers", &peers)
      .def(
          "disconnect",
          [](Pool& self, py::handle peer_argument) {
            const std::string peer(text_from(peer_argument, "peer"));
            Service& service = service_of(self);
            const GilReleased released;
            service.disconnect(peer);
          },
          py::arg("peer"), R"(Parts from a peer.

Transfers with it that are under way end with PeerLost on both sides; blocks that it had lent are given back, and
those that it borrowed or reserved are free again as soon as it can write to them no more. Releases the GIL.

Args:
    peer: Its name.

Raises:
    PeerLost: There is no such peer.)");
}

}  // namespace kvpool::bindings
