// kvpool.KeyedIndex, and KeyedMatch, which an index and a cache return.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <vector>

#include "arguments.h"
#include "bind.h"
#include "keyed_match.h"
#include "keys.h"
#include "kvpool/index/shared_keyed_index.h"
#include "vectors.h"

namespace kvpool::bindings {
namespace {

using KeyedIndexPointer = std::shared_ptr<SharedKeyedIndex>;

KeyedIndexPointer make_index(py::handle key_bytes) {
  return std::make_shared<SharedKeyedIndex>(count_from(key_bytes, "key_bytes"));
}

KeyedMatch match_index(const KeyedIndexPointer& index, py::handle keys_argument, py::handle every) {
  const bool all = flag_from(every, "every");
  const Keys keys = keys_from(keys_argument, index->key_bytes());
  return match_keys(index, keys, [&](std::vector<KeyedEntry*>& pins, Address* values, bool* stored) {
    return index->get(keys.data(), keys.n, all, pins, values, stored);
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

}  // namespace

void bind_keyed_index(py::module_& module) {
  bind_match(module);
  bind_index(module);
}

}  // namespace kvpool::bindings
