// kvpool.KeyedCache, and the blocks of it that somebody else fills.
#include "kvpool/pool/keyed_cache.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "arguments.h"
#include "bind.h"
#include "gil.h"
#include "keyed_match.h"
#include "keys.h"
#include "kvpool/pool/keyed_fill.h"
#include "node.h"
#include "rows.h"
#include "stream.h"
#include "vectors.h"

namespace kvpool::bindings {
namespace {

using KeyedCachePointer = std::shared_ptr<KeyedCache>;

// The blocks of a fill go back without the GIL, as the pool may wait.
struct FillDeleter {
  void operator()(KeyedFill* fill) const noexcept {
    const GilReleased released;
    delete fill;
  }
};
using FillPointer = std::unique_ptr<KeyedFill, FillDeleter>;

KeyedMatch match_cache(const KeyedCachePointer& cache, py::handle keys_argument, py::handle every) {
  const bool all = flag_from(every, "every");
  const Keys keys = keys_from(keys_argument, cache->key_bytes());
  return match_keys(cache, keys, [&](std::vector<KeyedEntry*>& pins, Address* values, bool* stored) {
    return cache->match(keys.data(), keys.n, all, pins, values, stored);
  });
}

KeyedCachePointer make_cache(py::handle pool_argument, py::handle blocks, py::handle key_bytes, py::handle name) {
  if (!py::isinstance<PeerNode>(pool_argument)) {
    throw_type_error("pool must be a Pool, and is " + type_name(pool_argument));
  }
  const PoolPointer pool = pool_of(pool_argument.cast<NodePointer>());
  std::string own(name.is_none() ? std::string_view() : text_from(name, "name"));
  auto cache = std::make_shared<KeyedCache>(pool, count_from(key_bytes, "key_bytes"), count_from(blocks, "blocks"),
                                            std::move(own));
  if (!name.is_none()) pool->named_caches().add(cache->name(), cache);
  return cache;
}

FillPointer begin_fill(const KeyedCachePointer& cache, py::handle keys_argument) {
  const Keys keys = keys_from(keys_argument, cache->key_bytes());
  const GilReleased released;
  return FillPointer(new KeyedFill(cache, keys.data(), keys.n));
}

// The keys in one array, from any of their forms.
py::array_t<std::uint8_t> key_rows(py::handle keys_argument, py::handle key_bytes_argument) {
  const std::size_t key_bytes = count_from(key_bytes_argument, "key_bytes");
  const Keys keys = keys_from(keys_argument, key_bytes);
  py::array_t<std::uint8_t> rows({static_cast<py::ssize_t>(keys.n), static_cast<py::ssize_t>(key_bytes)});
  if (keys.n > 0) std::memcpy(rows.mutable_data(), keys.data(), keys.n * key_bytes);
  return rows;
}

// save, load: between blocks under keys and blocks of the caller.
template <auto kVerb>
std::size_t copy_keyed(const KeyedCachePointer& cache, py::handle keys_argument, py::handle addresses,
                       py::handle stream) {
  const CallerStream after = stream_from(stream);
  const Keys keys = keys_from(keys_argument, cache->key_bytes());
  const Vector<Address> blocks = addresses_from(addresses);
  const GilReleased released;
  return ((*cache).*kVerb)(keys.data(), keys.n, {blocks.data(), blocks.size()}, after);
}

// put, get: between blocks under keys and rows of the caller.
template <auto kVerb, bool kInto>
std::size_t copy_keyed_rows(const KeyedCachePointer& cache, py::handle keys_argument, py::handle rows_argument) {
  const Keys keys = keys_from(keys_argument, cache->key_bytes());
  const Rows rows(rows_argument, kInto ? "into" : "rows", keys.n, cache->block_bytes(), /*writable=*/kInto);
  const GilReleased released;
  return ((*cache).*kVerb)(keys.data(), keys.n, rows.data());
}

py::dict to_dict(const KeyedCacheStats& stats) {
  py::dict dict;
  dict["blocks"] = stats.blocks;
  dict["evictable"] = stats.evictable;
  dict["blocks_max"] = stats.blocks_max;
  dict["index_bytes"] = stats.index_bytes;
  dict["saved_blocks"] = stats.saved_blocks;
  dict["duplicate_blocks"] = stats.duplicate_blocks;
  dict["found_blocks"] = stats.found_blocks;
  dict["missed_blocks"] = stats.missed_blocks;
  dict["evicted_blocks"] = stats.evicted_blocks;
  return dict;
}

void bind_fill(py::module_& module) {
  py::class_<KeyedFill, FillPointer>(module, "KeyedFill",
                                     "Blocks of a KeyedCache that somebody else fills: Peers.fetch_keys.")
      .def_property_readonly(
          "positions", [](const KeyedFill& fill) { return to_array(fill.positions().data(), fill.positions().size()); },
          "uint64 array: which keys get a block.")
      .def_property_readonly(
          "addrs", [](const KeyedFill& fill) { return to_array(fill.addresses().data(), fill.addresses().size()); },
          "uint64 array of their blocks.")
      .def(
          "commit",
          [](KeyedFill& fill) {
            const GilReleased released;
            return fill.commit();
          },
          "Stores them; returns how many are new.")
      .def(
          "close",
          [](KeyedFill& fill) {
            const GilReleased released;
            fill.close();
          },
          "Gives back those that are not stored. Idempotent.");
  module.def("_key_rows", &key_rows, py::arg("keys"), py::arg("key_bytes"));
}

void bind_cache(py::module_& module) {
  py::class_<KeyedCache, KeyedCachePointer>(module, "KeyedCache",
                                            R"(Blocks of a pool's DRAM, stored under keys in place of tokens.

For engines that name a block by a hash, and own the memory that they compute in: blocks are copied in (`save`, `put`) and
out (`load`, `get`). The cache allocates blocks of the pool as they are needed, which may make the pool drop cached
prompts, and gives them back when it evicts. The pool does not evict them: they count as active there, and `blocks`
bounds how many there are. Thread-safe; keys as in KeyedIndex.

Args:
    pool: The Pool. The cache keeps it.
    blocks: The most blocks that it holds, 1 to the DRAM blocks of the pool.
    key_bytes: The length of a key in bytes, 8 to 64.
    name: Peers of the pool find it by this name, until it is closed: see Peers.match_keys. None: it is for this process
        alone. StateError if the pool has an open cache of the name already.

Raises, in every method: ArgumentError, ArgumentTypeError as KeyedIndex does; ClosedError after close of the cache or the
pool; ForkError; and the error with which the pool has failed.)")
      .def(py::init(&make_cache), py::arg("pool"), py::arg("blocks"), py::arg("key_bytes") = 32,
           py::arg("name") = py::none())
      .def("_fill", &begin_fill, py::arg("keys"))
      .def_property_readonly(
          "name",
          [](const KeyedCache& cache) {
            return cache.name().empty() ? py::object(py::none()) : py::object(text_of(cache.name()));
          },
          "Its name for peers, or None.")
      .def_property_readonly("key_bytes", &KeyedCache::key_bytes, "The length of a key in bytes.")
      .def_property_readonly("block_bytes", &KeyedCache::block_bytes, "Bytes of a block.")
      .def("exists", &exists<KeyedCache>, py::arg("keys"),
           "bool array, one for each key: whether it is stored. Pins nothing and does not count as a use.")
      .def("count", &count_first<KeyedCache>, py::arg("keys"),
           "How many keys from the first one on are stored. Pins nothing and does not count as a use.")
      .def("match", &match_cache, py::arg("keys"), py::arg("every") = false,
           R"(Finds the blocks that are stored from the first key on, and pins them, to read them where they are.

Args:
    keys: In the order of the blocks in their sequence, so that its end is evicted first.
    every: Pin all that are stored, also behind a key that is not.

Returns:
    A KeyedMatch. The blocks stay until it is closed. They are the cache's: read them, and do not free or insert them.)")
      .def("save", &copy_keyed<&KeyedCache::save>, py::arg("keys"), py::arg("addrs"), py::arg("stream") = py::none(),
           R"(Stores copies of blocks in the pool's HBM. Keys that are stored already keep their block.

Args:
    keys: As in match.
    addrs: uint64 array of active HBM blocks of the caller's, one for each key.
    stream: As in Pool.swap_out: the copy begins after the work in it.

Returns:
    How many blocks are new.

Raises:
    OutOfBlocks: There is no room, because what is stored is pinned, or the pool has too few blocks in DRAM.
    StaleAddress, NotOwner, StateError, DeviceLost: As Pool.copy raises them.)")
      .def("load", &copy_keyed<&KeyedCache::load>, py::arg("keys"), py::arg("into"), py::arg("stream") = py::none(),
           R"(Copies the blocks that are stored from the first key on into blocks in the pool's HBM.

Args:
    keys: As in match.
    into: uint64 array of active HBM blocks of the caller's, one for each key.
    stream: As in Pool.swap_in.

Returns:
    How many blocks have been loaded. Those of `into` behind them are as before.

Raises:
    StaleAddress, NotOwner, StateError, DeviceLost: As Pool.copy raises them.)")
      .def("put", &copy_keyed_rows<&KeyedCache::save_rows, false>, py::arg("keys"), py::arg("rows"),
           R"(As save, from memory of the caller in ordinary RAM.

Args:
    keys: As in match.
    rows: A contiguous buffer of n * block_bytes bytes: a block for each key, its pieces in the order of the layout.

Returns:
    How many blocks are new.

Raises:
    OutOfBlocks: As in save.
    Unsupported: The memory of the pool is in the processes of its ranks.)")
      .def("get", &copy_keyed_rows<&KeyedCache::load_rows, true>, py::arg("keys"), py::arg("into"),
           R"(As load, into memory of the caller in ordinary RAM.

Args:
    keys: As in match.
    into: A contiguous, writable buffer of n * block_bytes bytes.

Returns:
    How many blocks have been loaded, from the first key on. The rows behind them are as before.

Raises:
    Unsupported: As in put.)")
      .def(
          "forget",
          [](const KeyedCachePointer& cache, py::handle keys_argument) {
            const Keys keys = keys_from(keys_argument, cache->key_bytes());
            return cache->forget(keys.data(), keys.n);
          },
          py::arg("keys"),
          "Drops the blocks of keys, skips keys that are not stored, and returns how many blocks were dropped. Raises "
          "StateError, and drops nothing, when one of them is pinned.")
      .def(
          "evict", [](const KeyedCachePointer& cache, py::handle n) { return cache->evict(count_from(n, "n")); },
          py::arg("n"), "Drops up to n blocks that are not pinned, the least recently used first; returns how many.")
      .def(
          "close",
          [](const KeyedCachePointer& cache) {
            const GilReleased released;
            cache->close();
          },
          "Gives all blocks back to the pool, those that are pinned when their matches are closed. Idempotent.")
      .def_property_readonly(
          "closed", [](const KeyedCachePointer& cache) { return cache->closed(); }, "Whether it was closed.")
      .def(
          "__enter__", [](py::object self) { return self; }, "Itself.")
      .def(
          "__exit__",
          [](const KeyedCachePointer& cache, const py::object&, const py::object&, const py::object&) {
            const GilReleased released;
            cache->close();
          },
          "Closes.")
      .def("audit", &KeyedCache::audit, "Checks every invariant; raises AuditError when one is broken.")
      .def(
          "stats", [](const KeyedCachePointer& cache) { return to_dict(cache->stats()); },
          "Blocks stored, of these evictable ones, their bound, the index's bytes, and what was saved, found, missed "
          "and "
          "evicted so far; a dict.")
      .def("__len__", [](const KeyedCachePointer& cache) { return cache->stats().blocks; }, "Blocks stored.");
}

}  // namespace

void bind_keyed_cache(py::module_& module) {
  bind_fill(module);
  bind_cache(module);
}

}  // namespace kvpool::bindings
