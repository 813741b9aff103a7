// The class that kvpool.Pool derives from.
#include "kvpool/pool/pool.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "adopt.h"
#include "arguments.h"
#include "bind.h"
#include "counts.h"
#include "disk.h"
#include "events.h"
#include "gil.h"
#include "kvpool/pool/shared_space.h"
#include "kvpool/ranks/instance_ranks.h"
#include "node.h"
#include "reshard.h"
#include "service.h"
#include "stream.h"
#include "tensor.h"
#include "vectors.h"

namespace kvpool::bindings {
namespace {

EvictionPolicy policy_named(const std::string& name) {
  if (name == "lru") return EvictionPolicy::kLru;
  if (name == "lfu") return EvictionPolicy::kLfu;
  if (name == "fifo") return EvictionPolicy::kFifo;
  throw Error(ErrorCode::kArgument, "policy must be lru, lfu or fifo, and is " + name);
}

DeviceMemoryKind device_memory_named(const std::string& name) {
  if (name == "auto") return DeviceMemoryKind::kAuto;
  if (name == "virtual") return DeviceMemoryKind::kVirtual;
  if (name == "plain") return DeviceMemoryKind::kPlain;
  throw Error(ErrorCode::kArgument, "device_memory must be auto, virtual or plain, and is " + name);
}

// The tensors say where they are; a device that was asked for must be that.
void check_device(const PoolOptions& options) {
  const int adopted = options.adopted_hbm->device;
  if (options.device < 0 || options.device == adopted) return;
  throw Error(ErrorCode::kArgument,
              "device is cuda:" + std::to_string(options.device) + ", and the tensors to adopt are on " +
                  (adopted < 0 ? std::string("the CPU") : "cuda:" + std::to_string(adopted)),
              {{"device", options.device}});
}

// Waits for threads that may need the GIL to release Python objects.
template <class Closed>
void destroy(Closed* object) {
  if (Py_IsInitialized() == 0 || PyGILState_Check() == 0) {
    delete object;
    return;
  }
  const GilReleased released;
  delete object;
}

NodePointer make_node(std::uint32_t block_tokens, std::vector<std::size_t> piece_bytes, bool aggregated,
                      const py::object& hbm_blocks, const py::object& dram_blocks, const py::object& adopted,
                      const py::object& block_dim, py::handle engine_allocates, const py::object& shape,
                      const py::object& parallel, int device, const std::string& policy, int copy_threads,
                      const std::string& huge_pages, int numa_node, bool check_memory, const std::string& pin_dram,
                      const std::string& device_memory, bool audit, bool zero_on_alloc, std::int64_t lend_max,
                      double timeout_s, int attend_threads, const std::shared_ptr<SharedSpace>& space,
                      std::uint32_t pieces, const py::object& disk) {
  const auto blocks = [](const py::object& argument, const char* name) {
    const std::size_t count = count_from(argument, name);
    if (count > kBlocksMax) {
      throw Error(ErrorCode::kArgument,
                  std::string(name) + " is " + std::to_string(count) + ", and a medium has at most " +
                      std::to_string(kBlocksMax) + " blocks",
                  {{"value", static_cast<std::int64_t>(count)}, {"maximum", kBlocksMax}});
    }
    return static_cast<std::uint32_t>(count);
  };
  PoolOptions options;
  options.layout = Layout{block_tokens, std::move(piece_bytes), aggregated};
  if (!shape.is_none()) options.layout.format = shape_from(shape).format();
  if (!parallel.is_none()) options.sharding = sharding_from(shape, parallel);
  options.device = device;
  options.device_memory = device_memory_named(device_memory);
  options.hbm_blocks = blocks(hbm_blocks, "hbm_blocks");
  options.dram_blocks = blocks(dram_blocks, "dram_blocks");
  if (!adopted.is_none()) {
    options.adopted_hbm = adopt_tensors(adopted, count_from(block_dim, "block_dim"), options.layout.piece_bytes.size());
    check_device(options);
    options.device = options.adopted_hbm->device;
  }
  options.engine_allocates = flag_from(engine_allocates, "engine_allocates");
  options.policy = policy_named(policy);
  options.copy_threads = copy_threads;
  options.huge_pages = huge_pages_named(huge_pages);
  options.numa_node = numa_node;
  options.check_memory = check_memory;
  options.pin_dram = pin_dram == "always" || (pin_dram == "auto" && options.device >= 0);
  options.audit = audit;
  options.zero_on_alloc = zero_on_alloc;
  options.lend_max = lend_max;
  if (!disk.is_none()) {
    options.disk = disk_from(disk);
    options.disk->timeout_ns = static_cast<std::int64_t>(timeout_s * 1e9);
  }
  const GilReleased released;
  Pool* const pool = space == nullptr ? new Pool(options) : new Pool(options, space->share(options.layout, pieces));
  return {new PeerNode(PoolPointer(pool, destroy<Pool>), make_ranks, static_cast<std::int64_t>(timeout_s * 1e9),
                       attend_threads),  // checked by kvpool.Settings
          destroy<PeerNode>};
}

py::array_t<Address> alloc_here(Pool& pool, std::size_t n, MediumChoice medium, bool evict, const CallerStream& after) {
  if (n > pool.capacity(medium)) pool.throw_out_of_blocks(n, medium);  // before memory is made for the answer
  py::array_t<Address> addresses(static_cast<py::ssize_t>(n));
  Address* out = addresses.mutable_data();
  bool done = false;
  if (pool.zeroes_on_alloc()) {
    const GilReleased released;
    done = pool.try_alloc(n, medium, out);
  } else {
    done = pool.try_alloc(n, medium, out);
  }
  if (done) return addresses;
  if (!evict) pool.throw_out_of_blocks(n, medium);
  const GilReleased released;
  pool.alloc_evicting(n, medium, out, after);
  return addresses;
}

py::array_t<Address> alloc(PeerNode& node, py::handle n_argument, py::handle medium_argument, py::handle evict_argument,
                           py::handle instance, py::handle timeout, py::handle stream) {
  const std::size_t n = count_from(n_argument, "n");
  const MediumChoice medium = medium_choice_from(medium_argument);
  const CallerStream after = stream_from(stream);
  const bool evict = flag_from(evict_argument, "evict");
  if (!instance.is_none()) return alloc_at_peer(node, n, medium, evict, instance, timeout);
  try {
    return alloc_here(node.pool(), n, medium, evict, after);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kOutOfBlocks) node.pool().note_failed_alloc();
    throw;
  }
}

void free_blocks(PeerNode& node, py::handle addresses_argument) {
  const Vector<Address> addresses = addresses_from(addresses_argument);
  const auto is_local = [own = node.pool().instance()](Address address) {
    return instance_of(address) == 0 || instance_of(address) == own;
  };
  if (std::all_of(addresses.data(), addresses.data() + addresses.size(), is_local)) {
    node.pool().free(addresses.data(), addresses.size());
    return;
  }
  call_interruptibly([&](const GivenUp& given_up) { node.free(addresses.data(), addresses.size(), given_up); });
}

}  // namespace

HugePages huge_pages_named(const std::string& name) {
  if (name == "auto") return HugePages::kAuto;
  if (name == "never") return HugePages::kNever;
  if (name == "require") return HugePages::kRequire;
  throw Error(ErrorCode::kArgument, "huge_pages must be auto, never or require, and is " + name);
}

void bind_pool(py::module_& module) {
  PoolClass pool_class(module, "Pool", "The C++ half of kvpool.Pool.");
  pool_class
      .def(py::init(&make_node), py::kw_only(), py::arg("block_tokens"), py::arg("piece_bytes"), py::arg("aggregated"),
           py::arg("hbm_blocks"), py::arg("dram_blocks"), py::arg("adopted"), py::arg("block_dim"),
           py::arg("engine_allocates"), py::arg("shape"), py::arg("parallel"), py::arg("device"), py::arg("policy"),
           py::arg("copy_threads"), py::arg("huge_pages"), py::arg("numa_node"), py::arg("check_memory"),
           py::arg("pin_dram"), py::arg("device_memory"), py::arg("audit"), py::arg("zero_on_alloc"),
           py::arg("lend_max"), py::arg("timeout_s"), py::arg("attend_threads"), py::arg("space") = py::none(),
           py::arg("pieces") = 1, py::arg("disk") = py::none())
      .def("alloc", &alloc, py::arg("n"), py::arg("medium") = static_cast<int>(Medium::kHbm), py::arg("evict") = true,
           py::kw_only(), py::arg("instance") = py::none(), py::arg("timeout") = py::none(),
           py::arg("stream") = py::none(), R"(Allocates n blocks, all or nothing.

Contiguous runs are preferred. If too few are free, it evicts cached blocks, the least recently used first: from HBM to
DRAM, and from DRAM for good. Thread-safe.

Args:
    n: How many token blocks.
    medium: kvpool.HBM, kvpool.DRAM, or kvpool.MIXED: HBM first, the rest DRAM.
    evict: Whether cached blocks may be evicted for it.
    instance: The name of a peer, which lends its blocks. transfer(to=...) writes into them until the peer is lost or
        free() gives them back. Releases the GIL.
    timeout: With instance: seconds until DeadlineExceeded; None: the setting ``timeout_s``.
    stream: For a pool on a GPU, if blocks have to be evicted: as in swap_out.

Returns:
    uint64 array of n addresses. The blocks are active: the caller's, until free or insert.

Raises:
    OutOfBlocks: With the counts; nothing was allocated. PeerLost, Busy, DeadlineExceeded: The peer is not connected,
    lends no more blocks to this pool, or did not answer.)")
      .def("free", &free_blocks, py::arg("addrs"), R"(Frees active blocks of the caller. Thread-safe.

Gives blocks that peers lent back to them; the list may mix them with others, and the call then waits for the peers
without the GIL. If any address in the list is wrong, nothing is freed. Blocks that a lost peer had lent are lost with
it, which is no error. If a peer fails later, the call still asks all others and frees all other blocks, and then raises
the first error.

Args:
    addrs: Addresses; uint64 array, buffer, or list.

Raises:
    StaleAddress: One was freed or moved before.
    StateError: One is cached (see delete and evict) or in use by a transfer. If the engine allocates, this includes a
        transfer that reads the block: the engine must not use it again yet.
    NotOwner: One belongs to another instance.
    ArgumentError: The list has duplicates, or one is no address.
    PeerLost, DeadlineExceeded: A peer was lost meanwhile, or did not answer; its blocks are no longer lent.
    Busy: A peer takes messages too slowly; unless the peer itself has answered Busy, its blocks are still lent.)")
      .def("adopt", of_pool([](Pool& pool, py::handle blocks_argument) {
             const std::vector<std::uint32_t> blocks = block_numbers_from(blocks_argument);
             py::array_t<Address> addresses(static_cast<py::ssize_t>(blocks.size()));
             pool.adopt(blocks.data(), blocks.size(), addresses.mutable_data());
             return addresses;
           }),
           py::arg("blocks"), R"(Tells the pool that the engine uses these blocks, from now until ``free``.

For a pool made with ``engine_allocates=True``: over adopted memory, or over ranks. All or nothing, thread-safe.

Args:
    blocks: The engine's block ids.

Returns:
    uint64 array with the address of each. The blocks are active: they can be sent, and fetch can write ``to`` them, but
    they are never cached. Call ``free`` before the engine uses them for anything else.

Raises:
    StateError: A block is not free, because the engine has not given it back; or the pool itself allocates.
    ArgumentError: There is no such block.)")
      .def("close", &PeerNode::close, py::call_guard<GilReleased>(),
           "Ends the pool: every verb raises ClosedError from now on. Views of the memory stay valid. Idempotent.")
      .def_property_readonly("closed", of_pool([](Pool& pool) { return pool.closed(); }), "Whether close() was called.")
      .def("_block_table", of_pool([](Pool& pool, py::handle addresses) {
             const Vector<Address> blocks = addresses_from(addresses);
             py::array_t<std::int32_t> table(
                 {static_cast<py::ssize_t>(pool.pieces()), static_cast<py::ssize_t>(blocks.size())});
             pool.block_table(blocks.data(), blocks.size(), table.mutable_data());
             return table;
           }),
           py::arg("addrs"))
      .def_property_readonly("_space_number", of_pool([](Pool& pool) { return pool.space_number(); }))
      .def("_stats", of_pool([](Pool& pool) { return to_dict(pool.stats()); }))
      .def("_audit", of_pool([](Pool& pool) {
             PoolStats stats;
             {
               const GilReleased released;
               stats = pool.audit();
             }
             return to_dict(stats);
           }))
      .def("_arena", of_pool([](Pool& pool, py::handle medium) { return to_dict(*pool.arena(medium_from(medium))); }))
      .def("_subscribe", of_pool([](const PoolPointer& pool, py::handle capacity, py::handle include_cached) {
             return event_source(pool, count_from(capacity, "capacity_tokens"),
                                 flag_from(include_cached, "include_cached"));
           }),
           py::arg("capacity_tokens"), py::arg("include_cached"))
      .def("_view",
           of_pool([](Pool& pool, py::handle medium, std::vector<std::int64_t> shape, std::vector<std::int64_t> strides,
                      const std::string& dtype) {
             return make_tensor(pool.arena(medium_from(medium)), std::move(shape), std::move(strides), dtype);
           }),
           py::arg("medium"), py::arg("shape"), py::arg("strides"), py::arg("dtype"));
  bind_prompts(pool_class);
  bind_swap(module, pool_class);
  bind_disk(pool_class);
  bind_copies(module, pool_class);
  bind_suspend(pool_class);
  bind_attend(module, pool_class);
  bind_service(module, pool_class);
  bind_members(pool_class);
  bind_ranks(module, pool_class);
  bind_transfer(module, pool_class);
  bind_peer_match(module, pool_class);
  bind_received(module, pool_class);
}

}  // namespace kvpool::bindings
