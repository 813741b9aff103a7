// kvpool.KeyedIndex, kvpool.KeyedCache, and what their matches are.
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
#include "keys.h"
#include "kvpool/index/shared_keyed_index.h"
#include "kvpool/pool/keyed_cache.h"
#include "kvpool/pool/keyed_fill.h"
#include "node.h"
#include "rows.h"
#include "stream.h"
#include "vectors.h"

namespace kvpool::bindings {
namespace {

using KeyedIndexPointer = std::shared_ptr<SharedKeyedIndex>;
using KeyedCachePointer = std::shared_ptr<KeyedCache>;

// The blocks of a fill go back without the GIL, as the pool may wait.
struct FillDeleter {
  void operator()(KeyedFill* fill) const noexcept {
    const GilReleased released;
    delete fill;
  }
};
using FillPointer = std::unique_ptr<KeyedFill, FillDeleter>;

struct KeyedMatch {
  KeyPins pins;
  std::size_t first = 0;
  py::object found;
  py::object addrs;
};

// Where keys are stored, of an index or a cache.
template <class Owner>
py::array_t<bool> exists(Owner& owner, py::handle keys_argument) {
  const Keys keys = keys_from(keys_argument, owner.key_bytes());
  py::array_t<bool> stored(static_cast<py::ssize_t>(keys.n));
  owner.exists(keys.data(), keys.n, stored.mutable_data());
  return stored;
}

template <class Owner>
std::size_t count_first(Owner& owner, py::handle keys_argument) {
  const Keys keys = keys_from(keys_argument, owner.key_bytes());
  return owner.exists(keys.data(), keys.n, nullptr);
}

template <class Find>
KeyedMatch match_keys(const std::shared_ptr<KeyPinOwner>& owner, const Keys& keys, Find&& find) {
  KeyedMatch match;
  py::array_t<bool> stored(static_cast<py::ssize_t>(keys.n));
  std::vector<KeyedEntry*> pins;
  std::vector<Address> values(keys.n);
  const KeyedIndex::Hit hit = find(pins, values.data(), stored.mutable_data());
  match.pins = KeyPins(owner, std::move(pins));
  match.first = hit.first;
  match.found = std::move(stored);
  match.addrs = to_array(values.data(), hit.found);
  return match;
}

KeyedMatch match_index(const KeyedIndexPointer& index, py::handle keys_argument, py::handle every) {
  const bool all = flag_from(every, "every");
  const Keys keys = keys_from(keys_argument, index->key_bytes());
  return match_keys(index, keys, [&](std::vector<KeyedEntry*>& pins, Address* values, bool* stored) {
    return index->get(keys.data(), keys.n, all, pins, values, stored);
  });
}

KeyedMatch match_cache(const KeyedCachePointer& cache, py::handle keys_argument, py::handle every) {
  const bool all = flag_from(every, "every");
  const Keys keys = keys_from(keys_argument, cache->key_bytes());
  return match_keys(cache, keys, [&](std::vector<KeyedEntry*>& pins, Address* values, bool* stored) {
    return cache->match(keys.data(), keys.n, all, pins, values, stored);
  });
}

py::tuple put(SharedKeyedIndex& index, py::handle keys_argument, py::handle values_argument) {
  const Keys keys = keys_from(keys_argument, index.key_bytes());
  const Vector<Address> values = addresses_from(values_argument);
  if (values.size() != keys.n) {
    throw_argument(
        std::to_string(keys.n) + " keys, and " + std::to_string(values.size()) + " values",
        {{"needed", static_cast<std::int64_t>(keys.n)}, {"given", static_cast<std::int64_t>(values.size())}});
  }
  std::vector<Address> canonical(keys.n);
  std::vector<Address> duplicates;
  duplicates.reserve(keys.n);
  const std::size_t added = index.put(keys.data(), keys.n, values.data(), canonical.data());
  for (std::size_t i = 0; i < keys.n; ++i) {
    if (canonical[i] != values.data()[i]) duplicates.push_back(values.data()[i]);
  }
  return py::make_tuple(added, to_array(duplicates.data(), duplicates.size()));
}

KeyedIndexPointer make_index(py::handle key_bytes) {
  return std::make_shared<SharedKeyedIndex>(count_from(key_bytes, "key_bytes"));
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

std::size_t save(const KeyedCachePointer& cache, py::handle keys_argument, py::handle addresses, py::handle stream) {
  const CallerStream after = stream_from(stream);
  const Keys keys = keys_from(keys_argument, cache->key_bytes());
  const Vector<Address> from = addresses_from(addresses);
  const GilReleased released;
  return cache->save(keys.data(), keys.n, {from.data(), from.size()}, after);
}

std::size_t load(const KeyedCachePointer& cache, py::handle keys_argument, py::handle addresses, py::handle stream) {
  const CallerStream after = stream_from(stream);
  const Keys keys = keys_from(keys_argument, cache->key_bytes());
  const Vector<Address> into = addresses_from(addresses);
  const GilReleased released;
  return cache->load(keys.data(), keys.n, {into.data(), into.size()}, after);
}

std::size_t put_rows(const KeyedCachePointer& cache, py::handle keys_argument, py::handle rows_argument) {
  const Keys keys = keys_from(keys_argument, cache->key_bytes());
  const Rows rows(rows_argument, "rows", keys.n, cache->block_bytes(), /*writable=*/false);
  const GilReleased released;
  return cache->save_rows(keys.data(), keys.n, rows.data());
}

std::size_t get_rows(const KeyedCachePointer& cache, py::handle keys_argument, py::handle into_argument) {
  const Keys keys = keys_from(keys_argument, cache->key_bytes());
  const Rows into(into_argument, "into", keys.n, cache->block_bytes(), /*writable=*/true);
  const GilReleased released;
  return cache->load_rows(keys.data(), keys.n, into.data());
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

void bind_match(py::module_& module) {
  py::class_<KeyedMatch>(module, "KeyedMatch", R"(Blocks stored under keys, pinned until it is closed.

Attributes:
    first: Keys stored from the first one on.
    found: bool array, one for each key: whether it is pinned here.
    addrs: uint64 array of the addresses (an index alone: values) of the pinned keys, in their order.
    closed: Whether the pins have ended.)")
      .def_readonly("first", &KeyedMatch::first, "Keys stored from the first one on.")
      .def_property_readonly(
          "found", [](const KeyedMatch& match) { return match.found; }, "bool array: which keys are pinned here.")
      .def_property_readonly(
          "addrs", [](const KeyedMatch& match) { return match.addrs; },
          "uint64 array of the addresses of the pinned keys.")
      .def_property_readonly(
          "closed", [](const KeyedMatch& match) { return !match.pins.holds(); }, "Whether the pins are gone.")
      .def(
          "close", [](KeyedMatch& match) { match.pins.release(); }, "Releases the pins. Idempotent.")
      .def(
          "__enter__",
          [](py::object self) {
            if (!self.cast<const KeyedMatch&>().pins.holds()) throw Error(ErrorCode::kClosed, "the match is closed");
            return self;
          },
          "Itself.")
      .def(
          "__exit__",
          [](KeyedMatch& match, const py::object&, const py::object&, const py::object&) { match.pins.release(); },
          "Closes.")
      .def("__repr__", [](const KeyedMatch& match) {
        return "<KeyedMatch first=" + std::to_string(match.first) + (match.pins.holds() ? " pinned>" : ">");
      });
}

void bind_index(py::module_& module) {
  py::class_<SharedKeyedIndex, KeyedIndexPointer>(module, "KeyedIndex",
                                                  R"(An index from keys to values, usable without a pool.

For engines that name a block by a hash in place of its tokens. All keys have one length. Values are opaque 64-bit
numbers. Keys come as a list of bytes, as a list of str in hex digits, or in one buffer: a uint8 array of shape
[n, key_bytes], or bytes one after another. Thread-safe. A key costs about 100 bytes and constant time, whatever keys
others choose: the hash of its table has a secret seed.

Args:
    key_bytes: The length of a key in bytes, 8 to 64.

Raises, in every method: ArgumentError for a key of another length, ArgumentTypeError for what is no key.)")
      .def(py::init(&make_index), py::arg("key_bytes") = 32)
      .def_property_readonly("key_bytes", &SharedKeyedIndex::key_bytes, "The length of a key in bytes.")
      .def("exists", &exists<SharedKeyedIndex>, py::arg("keys"),
           "bool array, one for each key: whether it is stored. Pins nothing and does not count as a use.")
      .def("count", &count_first<SharedKeyedIndex>, py::arg("keys"),
           "How many keys from the first one on are stored. Pins nothing and does not count as a use.")
      .def("match", &match_index, py::arg("keys"), py::arg("every") = false,
           R"(Finds the keys that are stored from the first one on, and pins them.

Args:
    keys: As said above; in the order of the blocks in their sequence, so that its end is evicted first.
    every: Pin all keys that are stored, also behind one that is not.

Returns:
    A KeyedMatch. Pinned keys are neither evicted nor forgotten.)")
      .def("put", &put, py::arg("keys"), py::arg("values"),
           R"(Stores one value for each key. A key that is stored keeps its value. Counts as a use.

Args:
    keys: As in match.
    values: As many uint64 values.

Returns:
    How many keys are new, and a uint64 array of the given values that are not stored, because their key has another
    value.)")
      .def(
          "forget",
          [](SharedKeyedIndex& index, py::handle keys_argument) {
            const Keys keys = keys_from(keys_argument, index.key_bytes());
            const std::vector<Address> gone = index.forget(keys.data(), keys.n);
            return to_array(gone.data(), gone.size());
          },
          py::arg("keys"),
          "Removes keys, skips those that are not stored, and returns the removed values. Raises StateError, and "
          "removes "
          "nothing, when one of them is pinned.")
      .def(
          "evict",
          [](SharedKeyedIndex& index, py::handle n) {
            const std::vector<Address> gone = index.evict(count_from(n, "n"));
            return to_array(gone.data(), gone.size());
          },
          py::arg("n"),
          "Removes up to n keys that are not pinned, the least recently used first; returns their values.")
      .def("audit", &SharedKeyedIndex::audit, "Checks every invariant; raises AuditError when one is broken.")
      .def(
          "stats",
          [](SharedKeyedIndex& index) {
            const SharedKeyedStats stats = index.stats();
            py::dict dict;
            dict["keys"] = stats.keys;
            dict["evictable"] = stats.evictable;
            dict["bytes"] = stats.bytes;
            return dict;
          },
          "Keys, those that are not pinned, and bytes of memory; a dict.")
      .def("__len__", [](SharedKeyedIndex& index) { return index.stats().keys; }, "Keys stored.");
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
      .def("save", &save, py::arg("keys"), py::arg("addrs"), py::arg("stream") = py::none(),
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
      .def("load", &load, py::arg("keys"), py::arg("into"), py::arg("stream") = py::none(),
           R"(Copies the blocks that are stored from the first key on into blocks in the pool's HBM.

Args:
    keys: As in match.
    into: uint64 array of active HBM blocks of the caller's, one for each key.
    stream: As in Pool.swap_in.

Returns:
    How many blocks have been loaded. Those of `into` behind them are as before.

Raises:
    StaleAddress, NotOwner, StateError, DeviceLost: As Pool.copy raises them.)")
      .def("put", &put_rows, py::arg("keys"), py::arg("rows"),
           R"(As save, from memory of the caller in ordinary RAM.

Args:
    keys: As in match.
    rows: A contiguous buffer of n * block_bytes bytes: a block for each key, its pieces in the order of the layout.

Returns:
    How many blocks are new.

Raises:
    OutOfBlocks: As in save.
    Unsupported: The memory of the pool is in the processes of its ranks.)")
      .def("get", &get_rows, py::arg("keys"), py::arg("into"),
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

}  // namespace

void bind_keyed(py::module_& module) {
  bind_match(module);
  bind_index(module);
  bind_fill(module);
  bind_cache(module);
}

}  // namespace kvpool::bindings
