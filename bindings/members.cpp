// What a pool in a cluster is told by its directory: kvpool.Attachment calls these.
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind.h"
#include "service.h"

namespace kvpool::bindings {
namespace {

using MemberFields = std::tuple<std::string, std::uint32_t, std::uint64_t, std::vector<std::string>>;

void set_members(const PeerNode& node, std::vector<MemberFields> fields) {
  std::vector<ClusterMember> members;
  members.reserve(fields.size());
  for (auto& [name, instance, incarnation, addresses] : fields) {
    members.push_back({std::move(name), instance, incarnation, std::move(addresses)});
  }
  Service& service = service_of(node);
  const GilReleased released;
  service.set_members(std::move(members));
}

void meet(const PeerNode& node, const std::string& name, py::handle timeout) {
  const std::int64_t deadline = deadline_from(timeout, node.timeout_ns());
  Service& service = service_of(node);
  call_interruptibly([&](const GivenUp& given_up) { service.meet_member(name, {deadline, given_up}); });
}

}  // namespace

void bind_members(PoolClass& pool) {
  pool.def("_incarnation", [](PeerNode& self) { return service_of(self).incarnation(); })
      .def(
          "_join",
          [](PeerNode& self, std::uint32_t instance) {
            Service& service = service_of(self);
            const GilReleased released;
            service.join(instance);
          },
          py::arg("instance"))
      .def("_set_members", &set_members, py::arg("members"))
      .def("_meet", &meet, py::arg("name"), py::arg("timeout"))
      .def(
          "_expel",
          [](PeerNode& self, std::uint64_t incarnation, const std::string& why) {
            Service& service = service_of(self);
            const GilReleased released;
            service.expel(incarnation, why);
          },
          py::arg("incarnation"), py::arg("why"))
      .def(
          "_fence",
          [](PeerNode& self, const std::string& why) {
            Service& service = service_of(self);
            const GilReleased released;
            service.fence(why);
          },
          py::arg("why"))
      .def("_unfence",
           [](PeerNode& self) {
             Service& service = service_of(self);
             const GilReleased released;
             service.unfence();
           })
      .def("_dropped_by", [](PeerNode& self) { return service_of(self).dropped_by(); })
      .def("_awaited_writers",
           [](PeerNode& self) {
             const Service& service = service_of(self);
             const GilReleased released;
             return service.awaited_writers();
           })
      .def("_drop_service", [](PeerNode& self) {
        const GilReleased released;
        self.drop_service();
      });
}

}  // namespace kvpool::bindings
