// The class that kvpool.InstanceIndex derives from.
#include "kvpool/index/instance_index.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "arguments.h"
#include "bind.h"
#include "vectors.h"

namespace kvpool::bindings {
namespace {

// Arguments are read before the lock is taken: reading them may run Python code, and that may let another thread run.
struct LockedInstanceIndex {
  LockedInstanceIndex(std::uint32_t page_tokens, std::size_t pages_max)
      : index(page_tokens, random_hash_seed(), pages_max) {}
  std::mutex mutex;
  InstanceIndex index;
};

std::unique_ptr<LockedInstanceIndex> make_index(const py::object& block_tokens, const py::object& blocks_max) {
  const std::size_t page = count_from(block_tokens, "block_tokens");
  if (page < 1 || page > 65536) {
    throw Error(ErrorCode::kArgument, "block_tokens must be 1 to 65536, and is " + std::to_string(page));
  }
  const std::size_t most = blocks_max.is_none() ? 0 : count_from(blocks_max, "blocks_max");
  if (!blocks_max.is_none() && most < 1) throw Error(ErrorCode::kArgument, "blocks_max must be at least 1, or None");
  return std::make_unique<LockedInstanceIndex>(static_cast<std::uint32_t>(page), most);
}

std::uint32_t instance_from(py::handle argument) {
  const std::size_t instance = count_from(argument, "instance");
  if (instance > kInstanceMax) {
    throw Error(ErrorCode::kArgument,
                "instance is " + std::to_string(instance) + "; it must be from 0 to " + std::to_string(kInstanceMax));
  }
  return static_cast<std::uint32_t>(instance);
}

std::vector<InstanceHit> hits_of(LockedInstanceIndex& self, py::handle tokens_argument, py::handle now,
                                 py::handle name_argument) {
  const std::uint64_t time = now.is_none() ? 0 : count_from(now, "now");  // which may run Python code
  const Vector<Token> tokens = tokens_to_find(tokens_argument);
  const std::string_view name = name_from(name_argument);
  std::vector<InstanceHit> hits;
  const std::lock_guard lock(self.mutex);
  if (now.is_none()) {
    self.index.peek(name, tokens.data(), tokens.size(), hits);
  } else {
    self.index.match(name, tokens.data(), tokens.size(), time, hits);
  }
  return hits;
}

py::list match(LockedInstanceIndex& self, py::handle tokens, py::handle now, py::handle name) {
  const std::vector<InstanceHit> hits = hits_of(self, tokens, now, name);
  py::list result(hits.size());
  for (std::size_t i = 0; i < hits.size(); ++i) {
    result[i] = py::make_tuple(hits[i].instance, hits[i].pages * self.index.page_tokens());
  }
  return result;
}

py::tuple match_arrays(LockedInstanceIndex& self, py::handle tokens, py::handle now, py::handle name) {
  const std::vector<InstanceHit> hits = hits_of(self, tokens, now, name);
  py::array_t<std::int64_t> instances(static_cast<py::ssize_t>(hits.size()));
  py::array_t<std::int64_t> lengths(static_cast<py::ssize_t>(hits.size()));
  std::int64_t* const instance = instances.mutable_data();
  std::int64_t* const length = lengths.mutable_data();
  for (std::size_t i = 0; i < hits.size(); ++i) {
    instance[i] = hits[i].instance;
    length[i] = static_cast<std::int64_t>(hits[i].pages * self.index.page_tokens());
  }
  return py::make_tuple(std::move(instances), std::move(lengths));
}

struct FoundHits {
  InstanceHits hits;
  std::size_t page_tokens;
};

FoundHits find(LockedInstanceIndex& self, py::handle tokens_argument, py::handle name_argument,
               py::handle since_argument) {
  const std::uint64_t since = count_from(since_argument, "since");
  const Vector<Token> tokens = tokens_to_find(tokens_argument);
  const std::string_view name = name_from(name_argument);
  FoundHits found{{}, self.index.page_tokens()};
  const std::lock_guard lock(self.mutex);
  self.index.peek(name, tokens.data(), tokens.size(), found.hits, since);
  return found;
}

std::size_t expire(LockedInstanceIndex& self, py::handle before, py::handle nodes_argument) {
  const std::uint64_t time = count_from(before, "before");
  const std::size_t nodes = nodes_argument.is_none() ? 0 : count_from(nodes_argument, "nodes");
  const std::lock_guard lock(self.mutex);
  return nodes_argument.is_none() ? self.index.expire(time) : self.index.expire_some(time, nodes);
}

py::list lengths_of(const FoundHits& self) {
  const auto& levels = self.hits.levels();
  py::list lengths(levels.size());
  for (std::size_t i = 0; i < levels.size(); ++i) lengths[i] = levels[i].pages * self.page_tokens;
  return lengths;
}

py::list bounds_of(const FoundHits& self) {
  const auto& levels = self.hits.levels();
  py::list bounds(levels.size() + 1);
  for (std::size_t i = 0; i < levels.size(); ++i) bounds[i] = levels[i].begin;
  bounds[levels.size()] = self.hits.instances().size();
  return bounds;
}

// As slices of Python: indices beyond the end are cut off.
py::array_t<std::int64_t> instances_of(const FoundHits& self, py::handle start_argument, py::handle stop_argument) {
  const auto& instances = self.hits.instances();
  const std::size_t stop = std::min(count_from(stop_argument, "stop"), instances.size());
  const std::size_t start = std::min(count_from(start_argument, "start"), stop);
  py::array_t<std::int64_t> result(static_cast<py::ssize_t>(stop - start));
  std::copy(instances.begin() + static_cast<std::ptrdiff_t>(start),
            instances.begin() + static_cast<std::ptrdiff_t>(stop), result.mutable_data());
  return result;
}

}  // namespace

void bind_instance_index(py::module_& module) {
  py::class_<FoundHits>(module, "InstanceHits",
                        "How much of one prompt each instance holds: the result of InstanceIndex.find.")
      .def(
          "__len__", [](const FoundHits& self) { return self.hits.instances().size(); },
          "Instances that hold some of it.")
      .def_property_readonly("lengths", &lengths_of, "The different numbers of tokens that are held, longest first.")
      .def_property_readonly("bounds", &bounds_of,
                             "Where the instances of each length begin, among all that hold some; and the end.")
      .def("instances", &instances_of, py::arg("start"), py::arg("stop"),
           "The instances at [start, stop), the longest first, then by id; int64.")
      .def(
          "level",
          [](const FoundHits& self, py::handle instance) { return self.hits.level_of(instance_from(instance)); },
          py::arg("instance"), "The place of an instance's length in `lengths`; len(lengths) if it holds nothing.");

  py::class_<LockedInstanceIndex>(module, "InstanceIndex", "The C++ half of kvpool.InstanceIndex.")
      .def(py::init(&make_index), py::arg("block_tokens") = 16, py::arg("blocks_max") = py::none())
      .def_property_readonly(
          "block_tokens", [](const LockedInstanceIndex& self) { return self.index.page_tokens(); }, "Tokens a block.")
      .def_property_readonly(
          "blocks_max",
          [](const LockedInstanceIndex& self) -> py::object {
            if (self.index.pages_max() == 0) return py::none();
            return py::int_(self.index.pages_max());
          },
          "Blocks that it has at most; None for no bound.")
      .def_property_readonly(
          "evicted",
          [](LockedInstanceIndex& self) {
            const std::lock_guard lock(self.mutex);
            return self.index.pages_evicted();
          },
          "Blocks that were forgotten because there were more than blocks_max, so far.")
      .def(
          "insert",
          [](LockedInstanceIndex& self, py::handle tokens_argument, py::handle instance, py::handle now,
             py::handle name_argument, py::handle lasting_argument, py::handle since_argument) {
            const std::uint64_t since = count_from(since_argument, "since");
            const bool lasting = flag_from(lasting_argument, "lasting");
            const Vector<Token> tokens = tokens_from(tokens_argument);
            const std::string_view name = name_from(name_argument);
            const std::uint32_t id = instance_from(instance);
            const std::uint64_t time = count_from(now, "now");
            const std::lock_guard lock(self.mutex);
            return self.index.insert(name, tokens.data(), tokens.size() / self.index.page_tokens(), id, time, lasting,
                                     since);
          },
          py::arg("tokens"), py::arg("instance"), py::arg("now") = 0, py::arg("namespace") = "", py::kw_only(),
          py::arg("lasting") = false, py::arg("since") = 0,
          R"(Notes that the instance holds the whole blocks of these tokens.

Args:
    tokens: Token ids; an incomplete last block is ignored.
    instance: Instance id, 0 to 16383.
    now: Time of the use, in any unit that grows.
    namespace: Prefixes of different namespaces never match each other.
    lasting: Whether expire leaves them alone. For instances whose events report evictions.
    since: Blocks that the instance has not used at this time or later count as not held.

Returns:
    Blocks that the instance did not hold before. If there are more than blocks_max now, the index forgets the least
    recently used blocks of any instance; of a prompt that exceeds blocks_max alone, it forgets the end.)")
      .def("match", &match, py::arg("tokens"), py::arg("now") = py::none(), py::arg("namespace") = "",
           R"(How much of a prompt each instance holds.

Args:
    tokens: Token ids.
    now: Time of the use; None: the call does not count as a use.
    namespace: As in insert.

Returns:
    A list of (instance, tokens), the longest first, for every instance that holds the first block.)")
      .def("match_arrays", &match_arrays, py::arg("tokens"), py::arg("now") = py::none(), py::arg("namespace") = "",
           R"(As match, for a router with a thousand instances to compare.

Returns:
    Two int64 arrays of one length: the instances, and the tokens that each holds, the longest first.)")
      .def("find", &find, py::arg("tokens"), py::arg("namespace") = "", py::kw_only(), py::arg("since") = 0,
           R"(As match without counting as a use, for a router that queries a few of many instances.

Args:
    tokens: Token ids.
    namespace: As in insert.
    since: Leaves out, for each instance, the blocks that it has not used at this time or later, except lasting ones.

Returns:
    A snapshot of the result: later calls do not change it.)")
      .def(
          "remove",
          [](LockedInstanceIndex& self, py::handle tokens_argument, py::handle instance, py::handle first_block,
             py::handle name_argument) {
            const Vector<Token> tokens = tokens_from(tokens_argument);
            const std::string_view name = name_from(name_argument);
            const std::size_t first = count_from(first_block, "first_block");
            const std::uint32_t id = instance_from(instance);
            const std::lock_guard lock(self.mutex);
            return self.index.remove(name, tokens.data(), tokens.size(), first, id);
          },
          py::arg("tokens"), py::arg("instance"), py::arg("first_block") = 0, py::arg("namespace") = "",
          R"(Notes that the instance no longer holds this prompt from a block on, nor any longer prompt.

Returns:
    Blocks that it held there.)")
      .def(
          "remove_instance",
          [](LockedInstanceIndex& self, py::handle instance) {
            const std::uint32_t id = instance_from(instance);
            const std::lock_guard lock(self.mutex);
            return self.index.remove_instance(id);
          },
          py::arg("instance"), "Removes an instance. Returns how many blocks it held.")
      .def("expire", &expire, py::arg("before"), py::arg("nodes") = py::none(),
           R"(Forgets, for each instance, the blocks that it did not use at `before` or later, except lasting ones.

Args:
    before: A time.
    nodes: How much to look at, in prompts, or parts that prompts share, with 64 instances each; None: everything. Each
        call goes on where the last one ended, and also looks at as much as was used since the first of them, but at
        most four times `nodes` at a time; `before` is that of the call that began with the first. So it ends after at
        most as many calls as there are nodes, over `nodes`, unless more is used between two of them.

Returns:
    The number of blocks, each counted once for every instance that held it.)")
      .def(
          "blocks",
          [](LockedInstanceIndex& self, py::handle instance) {
            const std::uint32_t id = instance_from(instance);
            const std::lock_guard lock(self.mutex);
            return self.index.pages(id);
          },
          py::arg("instance"), "Blocks that the instance holds.")
      .def(
          "__len__",
          [](LockedInstanceIndex& self) {
            const std::lock_guard lock(self.mutex);
            return self.index.pages();
          },
          "Blocks that any instance holds.")
      .def(
          "audit",
          [](LockedInstanceIndex& self) {
            const std::lock_guard lock(self.mutex);
            self.index.audit();
          },
          "Checks every invariant; raises AuditError when one is broken.");
}

}  // namespace kvpool::bindings
