// Logical instances: their ranks, at the scheduler and in the processes that hold them.
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "arguments.h"
#include "bind.h"
#include "gil.h"
#include "kvpool/pool/pool.h"
#include "kvpool/ranks/rank_hub.h"
#include "kvpool/ranks/rank_node.h"
#include "reshard.h"
#include "service.h"

namespace kvpool::bindings {
namespace {

using namespace py::literals;

// The facts of a kvpool.RankInfo, by the names of its fields.
py::list ranks(const PeerNode& node) {
  std::vector<RankInfo> ranks;
  {
    Service& service = service_of(node);
    const GilReleased released;
    ranks = service.ranks();
  }
  py::list list;
  for (const RankInfo& rank : ranks) {
    list.append(py::dict("rank"_a = rank.rank, "joined"_a = rank.joined, "pid"_a = rank.pid, "host"_a = rank.host,
                         "link"_a = rank.link, "address"_a = rank.address));
  }
  return list;
}

// What a rank needs to know of its scheduler, besides what Python knows.
py::tuple scheduler_facts(const PeerNode& node) {
  Service& service = service_of(node);
  return py::make_tuple(service.incarnation(), node.pool().instance());
}

LocalMemory memory_of(Pool& pool) {
  pool.check_unshared("a rank of an instance");
  return {pool.layout(), pool.arenas()};
}

// Waits for threads.
void destroy(RankNode* node) {
  if (Py_IsInitialized() == 0 || PyGILState_Check() == 0) {
    delete node;
    return;
  }
  const GilReleased released;
  delete node;
}

std::shared_ptr<RankNode> join(const PeerNode& memory, const std::string& name, const std::string& secret,
                               const std::string& model, std::vector<std::string> routes, double lease_s,
                               int transfer_threads, bool trusted_network, bool prefer_unix_socket,
                               const std::string& ucx, const std::string& nccl, std::uint64_t nccl_pass_bytes,
                               double nccl_init_s, int nccl_thread_blocks, const std::string& scheduler,
                               std::uint64_t incarnation, std::uint32_t instance, std::uint32_t rank,
                               const std::string& listen, py::handle timeout) {
  const std::int64_t deadline = deadline_from(timeout, memory.timeout_ns());
  RankOptions options;
  options.service.name = name;
  options.service.secret = secret;
  options.service.model = model;
  options.service.routes = std::move(routes);
  options.service.lease_ns = static_cast<std::int64_t>(lease_s * 1e9);  // checked by kvpool.Settings
  options.service.worker_threads = transfer_threads;
  options.service.trusted_network = trusted_network;
  options.service.prefer_unix_socket = prefer_unix_socket;
  options.service.transports.ucx = ucx;
  options.service.transports.nccl = nccl;
  options.service.transports.nccl_limits.pass_bytes = nccl_pass_bytes;
  options.service.transports.nccl_limits.init_ns = static_cast<std::int64_t>(nccl_init_s * 1e9);
  options.service.transports.nccl_limits.thread_blocks_max = nccl_thread_blocks;
  options.scheduler = scheduler;
  options.scheduler_incarnation = incarnation;
  options.instance = instance;
  options.rank = rank;
  options.listen = listen;
  const LocalMemory local = memory_of(memory.pool());
  return call_interruptibly([&](const GivenUp& given_up) {
    return std::shared_ptr<RankNode>(RankNode::join(options, local, Waiting(deadline, given_up)).release(), destroy);
  });
}

}  // namespace

void bind_ranks(py::module_& module, PoolClass& pool) {
  pool.def("_ranks", &ranks).def("_scheduler_facts", &scheduler_facts);
  pool.def(
      "_wait_for_ranks",
      [](PeerNode& self, py::handle timeout) {
        const std::int64_t deadline = deadline_from(timeout, self.timeout_ns());
        Service& service = service_of(self);
        return wait_interruptibly(deadline, [&](std::int64_t until) { return service.wait_for_ranks(until); });
      },
      py::arg("timeout"));
  py::class_<RankNode, std::shared_ptr<RankNode>>(module, "RankNode", "A rank of a logical instance: kvpool.RankArena.")
      .def_property_readonly("address", &RankNode::address)
      .def("lost",
           [](const RankNode& self) -> py::object {
             const auto why = self.lost();
             return why ? exception_from(*why) : py::none();
           })
      .def(
          "wait_lost",
          [](RankNode& self, py::handle timeout) {
            const std::int64_t deadline = deadline_from(timeout, 0);
            return wait_interruptibly(deadline, [&](std::int64_t until) { return self.wait_lost(until); });
          },
          py::arg("timeout"))
      .def("close", &RankNode::close, py::call_guard<GilReleased>());
  module.def("_join_rank", &join, py::arg("memory"), py::kw_only(), py::arg("name"), py::arg("secret"),
             py::arg("model"), py::arg("routes"), py::arg("lease_s"), py::arg("transfer_threads"),
             py::arg("trusted_network"), py::arg("prefer_unix_socket"), py::arg("ucx"), py::arg("nccl"),
             py::arg("nccl_pass_bytes"), py::arg("nccl_init_s"), py::arg("nccl_thread_blocks"), py::arg("scheduler"),
             py::arg("incarnation"), py::arg("instance"), py::arg("rank"), py::arg("listen"), py::arg("timeout"));
}

}  // namespace kvpool::bindings
