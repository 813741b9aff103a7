// The class that kvpool.Pool derives from.
#include "kvpool/pool/pool.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "adopt.h"
#include "arguments.h"
#include "bind.h"
#include "counts.h"
#include "events.h"
#include "gil.h"
#include "kvpool/pool/shared_space.h"
#include "kvpool/ranks/instance_ranks.h"
#include "matching.h"
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
                      double timeout_s, int attend_threads, const std::shared_ptr<SharedSpace>& space) {
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
  const GilReleased released;
  Pool* const pool = space == nullptr ? new Pool(options) : new Pool(options, space->share(options.layout));
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

// Of the blocks that an insertion stores.
enum class Content : std::uint8_t { kThere, kToCome };

std::vector<InsertOutcome> insert_items(Pool& pool, std::string_view name, const std::vector<InsertItem>& items,
                                        bool free_duplicates, Content content) {
  if (content == Content::kThere) return pool.insert(name, items, free_duplicates);
  std::vector<InsertOutcome> outcomes;
  outcomes.reserve(1);
  outcomes.push_back(pool.insert_unfilled(name, items.front(), free_duplicates));
  return outcomes;
}

// REQUIRES: one prompt, if its content is to come.
std::vector<Inserted> insert_all(const PoolPointer& pool, const std::vector<std::pair<py::object, py::object>>& prompts,
                                 py::handle name_argument, py::handle free_duplicates_argument,
                                 Content content = Content::kThere) {
  const std::string_view name = name_from(name_argument);
  const bool free_duplicates = flag_from(free_duplicates_argument, "free_duplicates");
  std::vector<Vector<Token>> tokens;
  std::vector<Vector<Address>> addresses;
  std::vector<Inserted> inserted(prompts.size());
  std::vector<InsertItem> items;
  tokens.reserve(prompts.size());
  addresses.reserve(prompts.size());
  items.reserve(prompts.size());
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    const Vector<Token>& own_tokens = tokens.emplace_back(tokens_from(prompts[i].first));
    const Vector<Address>& own_addresses = addresses.emplace_back(addresses_from(prompts[i].second));
    py::array_t<Address> canonical(static_cast<py::ssize_t>(own_addresses.size()));
    items.push_back(
        {own_tokens.data(), own_tokens.size(), own_addresses.data(), own_addresses.size(), canonical.mutable_data()});
    inserted[i].addrs = std::move(canonical);
  }
  std::vector<InsertOutcome> outcomes = insert_items(*pool, name, items, free_duplicates, content);
  for (std::size_t i = 0; i < outcomes.size(); ++i) {
    inserted[i].pins = Pins(pool, outcomes[i].pin);
    inserted[i].tokens = items[i].n_tokens;
    inserted[i].inserted = outcomes[i].inserted;
  }
  for (std::size_t i = 0; i < outcomes.size(); ++i) {
    inserted[i].duplicates = to_array(outcomes[i].duplicates.data(), outcomes[i].duplicates.size());
  }
  return inserted;
}

Inserted insert(const PoolPointer& pool, const py::object& tokens, const py::object& addresses, py::handle name,
                py::handle free_duplicates, py::handle filled) {
  const auto how = flag_from(filled, "filled") ? Content::kThere : Content::kToCome;
  return std::move(insert_all(pool, {{tokens, addresses}}, name, free_duplicates, how).front());
}

// Brings a hit to HBM. The pins of the swap take the place of those of the match, which hold until then; if it throws,
// both are gone.
void bring_to_hbm(const PoolPointer& pool, Match& hit, const CallerStream& after) {
  const std::vector<Address> found = addresses_from(hit.addrs).copy();
  const auto in_hbm = [](Address address) { return medium_of(address) == Medium::kHbm; };
  if (std::all_of(found.begin(), found.end(), in_hbm)) return;
  py::array_t<Address> arrived(static_cast<py::ssize_t>(found.size()));
  Address* out = arrived.mutable_data();
  {
    const GilReleased released;
    hit.pins = Pins(pool, pool->swap_in(found, {}, out, after));
  }
  hit.addrs = std::move(arrived);
}

Match match_into(const PoolPointer& pool, py::handle tokens, py::handle name, py::handle into, py::handle stream) {
  if (into.is_none()) {
    if (!stream.is_none()) throw_argument("stream is for a match that brings blocks: give into=kvpool.HBM");
    return match(pool, tokens, name);
  }
  if (medium_choice_from(into) != MediumChoice(Medium::kHbm)) {
    throw_argument("into must be kvpool.HBM (1) or None: blocks are matched where they lie, or brought to HBM");
  }
  const CallerStream after = stream_from(stream);
  Match hit = match(pool, tokens, name);
  bring_to_hbm(pool, hit, after);
  return hit;
}

py::tuple explain(Pool& pool, py::handle tokens_argument, py::handle name_argument) {
  const Vector<Token> tokens = tokens_from(tokens_argument);
  const MatchExplanation found = pool.explain(name_from(name_argument), tokens.data(), tokens.size());
  return py::make_tuple(found.requested_tokens, found.matched_pages, found.partial_tokens, static_cast<int>(found.end),
                        to_array(found.addresses.data(), found.addresses.size()), found.elsewhere);
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
           py::arg("lend_max"), py::arg("timeout_s"), py::arg("attend_threads"), py::arg("space") = py::none())
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
      .def("match", of_pool(&match_into), py::arg("tokens"), py::arg("namespace") = "", py::kw_only(),
           py::arg("into") = py::none(), py::arg("stream") = py::none(),
           R"(Finds the longest cached prefix of a prompt, in whole blocks, and pins it.

Thread-safe. The cost depends on the length of the prompt, not on the size of the index.

Args:
    tokens: Token ids; int32 or int64 array, buffer, bytes as int32, or list.
    namespace: Prefixes of different namespaces never match each other.
    into: kvpool.HBM: brings blocks of the hit from DRAM to HBM, as by swap_in, so that every address of the hit is in
        HBM. Releases the GIL then. None: the blocks stay where they are.
    stream: With `into`: as in swap_in.

Returns:
    A Match. Its local addresses stay valid, and their content unchanged, until it is closed; use it in a ``with``.

Raises:
    OutOfBlocks: With `into`: HBM has no room for the whole hit; nothing was moved and nothing is pinned. A match
        without `into` still finds the hit where it is.)")
      .def("_match_batch", of_pool(&match_batch<Pool>), py::arg("prompts"), py::arg("namespace"))
      .def("insert", of_pool(&insert), py::arg("tokens"), py::arg("addrs"), py::arg("namespace") = "",
           py::arg("free_duplicates") = false, py::kw_only(), py::arg("filled") = true,
           R"(Gives blocks to the index: active becomes historical, without a copy.

All or nothing, thread-safe. If a block of the prompt is cached already, the cached block stays: the given one is a
duplicate, which the caller still owns. ``addrs`` may begin with the addresses of a match, unchanged.

Args:
    tokens: Token ids of whole blocks.
    addrs: One address for each block.
    namespace: As in match.
    free_duplicates: Free duplicates instead of leaving them to the caller.
    filled: False if the content of the blocks is still to come, from somebody who writes to them beside the pool. Match
        finds them at once, and it is for the caller to order what reads them after what fills them. Until ``filled`` is
        called, the pool keeps them where they are, and what would read them raises Busy:
        transfers, copies, swaps, sequences, and the fetches of peers, for which the prompt ends before them.

Returns:
    An Inserted with the canonical addresses, pinned until it is closed.

Raises:
    ArgumentError: Tokens are no multiple of a block; too few, too many or duplicate addresses.
    StateError: A block is cached already for other tokens, or an engine allocates it.
    StaleAddress: A block was freed or moved.)")
      .def("filled", of_pool([](Pool& pool, py::handle addresses_argument) {
             const Vector<Address> addresses = addresses_from(addresses_argument);
             pool.filled({addresses.data(), addresses.size()});
           }),
           py::arg("addrs"), R"(Says that the content of blocks that were inserted with ``filled=False`` is there.

All or nothing, thread-safe. If it could not be written, call ``forget`` before: then this says that nothing writes to
the blocks any more. They stay unreadable (StateError), and become free with their last pin.

Args:
    addrs: Addresses of such blocks, all of one insertion or some.

Raises:
    StateError: A block is not being filled. StaleAddress, NotOwner, ArgumentError: As for free.)")
      .def("forget", of_pool([](Pool& pool, py::handle addresses_argument) {
             const std::vector<Address> addresses = addresses_from(addresses_argument).copy();
             const GilReleased released;
             return pool.forget(addresses);
           }),
           py::arg("addrs"), R"(Drops cached blocks for good, and everything that continues them. Thread-safe.

For blocks whose content turned out to be wrong. No match finds them from now on. Those that are pinned stay readable by
their addresses until the last of their pins is released, but not for peers, whose fetches raise StaleAddress; the
others are free at once. A save, a transfer or a fetch under way that builds on them raises Busy when it ends: it can be
tried again.

Args:
    addrs: Addresses of cached blocks. Those that are gone already, because they were evicted or forgotten, are skipped.

Returns:
    How many blocks are found no more: these and what continued them.

Raises:
    StateError: A block is not cached. NotOwner, ArgumentError: As for free. Then nothing was dropped.)")
      .def("_insert_batch",
           of_pool([](const PoolPointer& pool, py::handle prompts, py::handle name, py::handle free_duplicates) {
             return insert_all(pool, pairs_from(prompts, "prompts"), name, free_duplicates);
           }),
           py::arg("prompts"), py::arg("namespace"), py::arg("free_duplicates"))
      .def("delete",
           of_pool([](Pool& pool, py::handle tokens_argument, py::handle name_argument, py::handle descendants) {
             const bool longer = flag_from(descendants, "descendants");
             const Vector<Token> tokens = tokens_from(tokens_argument);
             const std::string name(name_from(name_argument));
             const GilReleased released;
             return pool.erase(name, tokens.data(), tokens.size(), longer);
           }),
           py::arg("tokens"), py::arg("namespace") = "", py::arg("descendants") = false,
           R"(Removes the cached blocks of a prompt that no longer prompt shares.

Args:
    tokens: Token ids.
    namespace: As in match.
    descendants: Also remove every longer prompt that begins with this one.

Returns:
    Blocks removed.

Raises:
    StateError: Part of it is pinned; nothing was removed.)")
      .def("evict", of_pool([](Pool& pool, py::handle n_argument, py::handle medium_argument) {
             const std::size_t n = count_from(n_argument, "n");
             const MediumChoice medium = medium_choice_from(medium_argument);
             const GilReleased released;
             return pool.evict(n, medium);
           }),
           py::arg("n"), py::arg("medium") = static_cast<int>(Medium::kDram),
           "Drops up to n cached blocks of a medium for good, the least recently used first. Returns how many.")
      .def("close", &PeerNode::close, py::call_guard<GilReleased>(),
           "Ends the pool: every verb raises ClosedError from now on. Views of the memory stay valid. Idempotent.")
      .def_property_readonly("closed", of_pool([](Pool& pool) { return pool.closed(); }), "Whether close() was called.")
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
      .def("_explain", of_pool(&explain), py::arg("tokens"), py::arg("namespace"))
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
  bind_swap(module, pool_class);
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
