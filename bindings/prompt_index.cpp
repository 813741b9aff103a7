// The class that kvpool.PromptIndex derives from.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>

#include "arguments.h"
#include "bind.h"
#include "events.h"
#include "handles.h"
#include "kvpool/index/shared_index.h"
#include "matching.h"
#include "vectors.h"

namespace kvpool::bindings {
namespace {

using IndexPointer = std::shared_ptr<SharedIndex>;

IndexPointer make_index(const py::object& block_tokens, py::handle policy_argument) {
  const std::size_t page = count_from(block_tokens, "block_tokens");
  if (page < 1 || page > 65536) {
    throw Error(ErrorCode::kArgument, "block_tokens must be 1 to 65536, and is " + std::to_string(page));
  }
  const std::string_view policy = text_from(policy_argument, "policy");
  const EvictionPolicy kind =
      policy == "lru"   ? EvictionPolicy::kLru
      : policy == "lfu" ? EvictionPolicy::kLfu
      : policy == "fifo"
          ? EvictionPolicy::kFifo
          : throw Error(ErrorCode::kArgument, "policy must be lru, lfu or fifo, and is " + std::string(policy));
  return std::make_shared<SharedIndex>(static_cast<std::uint32_t>(page), kind);
}

std::vector<Inserted> insert_all(const IndexPointer& index,
                                 const std::vector<std::pair<py::object, py::object>>& prompts,
                                 py::handle name_argument) {
  const std::string_view name = name_from(name_argument);
  const std::size_t page = index->page_tokens();
  std::vector<Vector<Token>> tokens;
  std::vector<Vector<Address>> values;
  std::vector<SharedIndex::Item> items;
  std::vector<Inserted> results(prompts.size());
  tokens.reserve(prompts.size());
  values.reserve(prompts.size());
  items.reserve(prompts.size());
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    const Vector<Token>& own_tokens = tokens.emplace_back(tokens_from(prompts[i].first));
    const Vector<Address>& own_values = values.emplace_back(addresses_from(prompts[i].second));
    if (own_tokens.size() % page != 0 || own_values.size() != own_tokens.size() / page) {
      throw Error(ErrorCode::kArgument, std::to_string(own_tokens.size()) + " tokens and " +
                                            std::to_string(own_values.size()) + " values: insert whole blocks of " +
                                            std::to_string(page) + " tokens, one value for each");
    }
    py::array_t<Address> canonical(static_cast<py::ssize_t>(own_values.size()));
    items.push_back({own_tokens.data(), own_values.size(), own_values.data(), canonical.mutable_data()});
    results[i].addrs = std::move(canonical);
  }
  const std::vector<IndexInsertion> insertions = index->insert_all(name, items);
  for (std::size_t i = 0; i < insertions.size(); ++i) results[i].pins = Pins(index, insertions[i].pin);
  for (std::size_t i = 0; i < insertions.size(); ++i) {
    results[i].tokens = tokens[i].size();
    results[i].inserted = items[i].pages - insertions[i].pages_present;
    std::vector<Address> duplicates;
    for (std::size_t k = 0; k < insertions[i].pages_present; ++k) {
      if (items[i].values[k] != items[i].canonical[k]) duplicates.push_back(items[i].values[k]);
    }
    results[i].duplicates = to_array(duplicates.data(), duplicates.size());
  }
  return results;
}

Inserted insert(const IndexPointer& index, const py::object& tokens, const py::object& values, py::handle name) {
  return std::move(insert_all(index, {{tokens, values}}, name).front());
}

std::vector<Inserted> insert_batch(const IndexPointer& index, py::handle prompts, py::handle name) {
  return insert_all(index, pairs_from(prompts, "prompts"), name);
}

py::tuple explain(SharedIndex& index, py::handle tokens_argument, py::handle name) {
  const Vector<Token> tokens = tokens_from(tokens_argument);
  std::vector<Address> values(tokens.size() / index.page_tokens());
  std::vector<std::pair<std::string, std::size_t>> elsewhere;
  MatchEnd end = MatchEnd::kComplete;
  const IndexHit hit = index.peek(name_from(name), tokens.data(), tokens.size(), values.data(), &end, &elsewhere);
  return py::make_tuple(tokens.size(), hit.pages, hit.partial_tokens, static_cast<int>(end),
                        to_array(values.data(), hit.pages), elsewhere);
}

py::dict stats(SharedIndex& index) {
  const SharedIndexStats stats = index.stats();
  py::dict dict;
  dict["nodes"] = stats.nodes;
  dict["blocks"] = stats.pages;
  dict["evictable"] = stats.evictable;
  dict["bytes"] = stats.bytes;
  dict["namespaces"] = stats.namespaces;
  return dict;
}

}  // namespace

void bind_prompt_index(py::module_& module) {
  py::class_<SharedIndex, IndexPointer>(module, "PromptIndex", "The C++ half of kvpool.PromptIndex.")
      .def(py::init(&make_index), py::arg("block_tokens") = 16, py::arg("policy") = "lru")
      .def_property_readonly("block_tokens", &SharedIndex::page_tokens, "Tokens a block.")
      .def("match", &match<SharedIndex>, py::arg("tokens"), py::arg("namespace") = "",
           R"(Finds the longest stored prefix in whole blocks and pins it.

Args:
    tokens: Token ids; int32 or int64 array, buffer, bytes as int32, or list.
    namespace: Prefixes of different namespaces never match each other.

Returns:
    A Match; ``addrs`` holds the values. Pinned blocks are not evicted.)")
      .def(
          "peek",
          [](SharedIndex& index, py::handle tokens_argument, py::handle name_argument) {
            const Vector<Token> tokens = tokens_from(tokens_argument);
            return index.peek(name_from(name_argument), tokens.data(), tokens.size(), nullptr, nullptr, nullptr).pages *
                   index.page_tokens();
          },
          py::arg("tokens"), py::arg("namespace") = "",
          "Tokens that match() would find. Pins nothing and does not count as a use.")
      .def("_match_batch", &match_batch<SharedIndex>, py::arg("prompts"), py::arg("namespace"))
      .def("_insert_batch", &insert_batch, py::arg("prompts"), py::arg("namespace"))
      .def("_explain", &explain, py::arg("tokens"), py::arg("namespace"))
      .def("insert", &insert, py::arg("tokens"), py::arg("values"), py::arg("namespace") = "",
           R"(Stores one value for each block of a prompt. Blocks that are already stored keep their value.

Args:
    tokens: Token ids of whole blocks.
    values: uint64 values, opaque to the index.
    namespace: As in match.

Returns:
    An Inserted: ``addrs`` holds the values that are now in the index, ``duplicates`` the given ones that are not.)")
      .def(
          "delete",
          [](SharedIndex& index, py::handle tokens_argument, py::handle name_argument, py::handle descendants) {
            const bool longer = flag_from(descendants, "descendants");
            const Vector<Token> tokens = tokens_from(tokens_argument);
            const auto gone = index.erase(name_from(name_argument), tokens.data(), tokens.size(), longer);
            return to_array(gone.data(), gone.size());
          },
          py::arg("tokens"), py::arg("namespace") = "", py::arg("descendants") = false,
          R"(Removes the blocks of a prompt that no longer prompt shares; with ``descendants`` the longer ones too.

Returns the values of the removed blocks. Raises StateError, and removes nothing, when one of them is pinned.)")
      .def(
          "evict",
          [](SharedIndex& index, py::handle n) {
            const auto gone = index.evict(count_from(n, "n"));
            return to_array(gone.data(), gone.size());
          },
          py::arg("n"), "Drops up to n blocks that are not pinned, in the policy's order, and returns their values.")
      .def("audit", &SharedIndex::audit, "Checks every invariant; raises AuditError when one is broken.")
      .def("stats", &stats, "Nodes, blocks, evictable blocks, bytes of memory, namespaces; a dict.")
      .def(
          "__len__", [](SharedIndex& index) { return index.stats().pages; }, "Blocks stored.")
      .def(
          "_subscribe",
          [](const IndexPointer& index, py::handle capacity, py::handle include_cached) {
            return event_source(index, count_from(capacity, "capacity_tokens"),
                                flag_from(include_cached, "include_cached"));
          },
          py::arg("capacity_tokens"), py::arg("include_cached"));
}

}  // namespace kvpool::bindings
