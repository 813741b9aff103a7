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

void set_members(Pool& pool, std::vector<MemberFields> fields) {
  std::vector<ClusterMember> members;
  members.reserve(fields.size());
  for (auto& [name, instance, epoch, addresses] : fields) {
    members.push_back({std::move(name), instance, epoch, std::move(addresses)});
  }
  Service& service = service_of(pool);
  const GilReleased released;
  service.set_members(std::move(members));
}

void meet(Pool& pool, const std::string& name, py::handle timeout) {
  const std::int64_t deadline = deadline_from(timeout, kTimeoutNs);
  Service& service = service_of(pool);
  call_interruptibly([&](const GivenUp& given_up) { service.meet_member(name, {deadline, given_up}); });
}

}  // namespace

void bind_members(PoolClass& pool) {
  pool.def("_epoch", [](Pool& self) { return service_of(self).epoch(); })
      .def(
          "_join",
          [](Pool& self, std::uint32_t instance) {
            Service& service = service_of(self);
            const GilReleased released;
            service.join(instance);
          },
          py::arg("instance"))
      .def("_set_members", &set_members, py::arg("members"))
      .def("_meet", &meet, py::arg("name"), py::arg("timeout"))
      .def(
          "_expel",
          [](Pool& self, std::uint64_t epoch, const std::string& why) {
            Service& service = service_of(self);
            const GilReleased released;
            service.expel(epoch, why);
          },
          py::arg("epoch"), py::arg("why"))
      .def(
          "_fence",
          [](Pool& self, const std::string& why) {
            Service& service = service_of(self);
            const GilReleased released;
            service.fence(why);
          },
          py::arg("why"))
      .def("_unfence",
           [](Pool& self) {
             Service& service = service_of(self);
             const GilReleased released;
             service.unfence();
           })
      .def("_dropped_by", [](Pool& self) { return service_of(self).dropped_by(); })
      .def("_drop_service", [](Pool& self) {
        const GilReleased released;
        self.drop_service();
      });
}

}  // namespace kvpool::bindings
