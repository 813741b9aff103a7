// What KeyedIndex and KeyedCache have in common for Python: look-ups, and the match that pins what they found.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "arguments.h"
#include "keys.h"
#include "kvpool/index/shared_keyed_index.h"
#include "vectors.h"

namespace kvpool::bindings {

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

}  // namespace kvpool::bindings
