// The C++ half of kvpool.Space: memory in units, the quotas of its models, and the plan of an eviction by itself.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "arguments.h"
#include "bind.h"
#include "gil.h"
#include "kvpool/blocks/block_space.h"
#include "kvpool/blocks/quotas.h"
#include "kvpool/pool/shared_space.h"

namespace kvpool::bindings {
namespace {

using RuleNumbers = std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>;  // reserve, limit, quota
using ModelNumbers = std::tuple<std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t>;
using TierNumbers = std::pair<std::uint32_t, std::vector<ModelNumbers>>;  // capacity, rules with active and historical

QuotaRule rule_from(const RuleNumbers& numbers) {
  return {std::get<0>(numbers), std::get<1>(numbers), std::get<2>(numbers)};
}

QuotaTier tier_from(const TierNumbers& numbers) {
  QuotaTier tier;
  tier.capacity = numbers.first;
  if (numbers.second.size() > tier.models.size()) {
    throw_argument("a space has at most " + std::to_string(tier.models.size()) + " models");
  }
  for (std::size_t i = 0; i < numbers.second.size(); ++i) {
    const auto& [reserve, limit, quota, active, historical] = numbers.second[i];
    tier.models[i] = {{reserve, limit, quota}, active, historical};
  }
  return tier;
}

// None when it is refused; else what is free, and what each model evicts and how much of it goes to DRAM.
py::object plan_room(const TierNumbers& numbers, std::uint32_t model, std::uint32_t units,
                     const std::optional<TierNumbers>& dram) {
  const QuotaTier tier = tier_from(numbers);
  if (model >= tier.models.size()) throw_argument("no such model");
  if (!tier.admits(model, units)) return py::none();
  const std::optional<QuotaTier> below = dram ? std::optional(tier_from(*dram)) : std::nullopt;
  const QuotaRoom room = reclaim(tier, model, units, below ? &*below : nullptr);
  py::list evictions;
  for (const QuotaEviction& each : room) evictions.append(py::make_tuple(each.model, each.units, each.swapped));
  return py::make_tuple(room.free, evictions);
}

std::shared_ptr<SharedSpace> make_space(std::size_t unit_bytes, std::uint32_t hbm_units, std::uint32_t dram_units,
                                        std::uint32_t models_max, int copy_threads, const std::string& huge_pages,
                                        int numa_node, bool check_memory) {
  SharedSpaceOptions options;
  options.unit_bytes = unit_bytes;
  options.units[Medium::kHbm] = hbm_units;
  options.units[Medium::kDram] = dram_units;
  options.models_max = models_max;
  options.copy_threads = copy_threads;
  options.huge_pages = huge_pages_named(huge_pages);
  options.numa_node = numa_node;
  options.check_memory = check_memory;
  const GilReleased released;
  return std::make_shared<SharedSpace>(options);
}

// One moment of both media: [(capacity, rules and uses by number)].
std::vector<TierNumbers> tiers(const SharedSpace& shared) {
  std::vector<TierNumbers> both;
  const GilReleased released;
  const SpaceLock lock = shared.space().lock();
  for (const Medium medium : {Medium::kHbm, Medium::kDram}) {
    const QuotaTier tier = shared.space().quota_tier(medium);
    std::vector<ModelNumbers> models;
    for (const QuotaModel& each : tier.models) {
      models.emplace_back(each.rule.reserve, each.rule.limit, each.rule.quota, each.active, each.historical);
    }
    both.emplace_back(tier.capacity, std::move(models));
  }
  return both;
}

py::dict counts(const SharedSpace& shared, py::handle medium_argument) {
  const Medium medium = medium_from(medium_argument);
  UnitCounts units;
  std::uint32_t largest = 0;
  {
    const GilReleased released;
    const SpaceLock lock = shared.space().lock();
    units = shared.space().counts(medium);
    largest = shared.space().unit_set(medium).longest_free();
  }
  py::dict dict;
  dict["capacity"] = units.capacity;
  for (int code = 0; code < kBlockStateCount; ++code) {
    const auto state = static_cast<BlockState>(code);
    if (state == BlockState::kSuspended) continue;  // no state of a unit
    dict[block_state_name(state)] = units.by_state[static_cast<std::size_t>(code)];
  }
  dict["largest_run"] = largest;
  return dict;
}

void set_rules(const SharedSpace& shared, std::uint32_t number, const std::string& model, const RuleNumbers& hbm,
               const RuleNumbers& dram) {
  MediumMap<QuotaRule> rules{};
  rules[Medium::kHbm] = rule_from(hbm);
  rules[Medium::kDram] = rule_from(dram);
  const GilReleased released;
  const SpaceLock lock = shared.space().lock();
  shared.space().set_rules(number, rules, model);
}

// All at once, so that their sum is at no time another one.
void set_quotas(const SharedSpace& shared,
                const std::vector<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>>& quotas) {
  const GilReleased released;
  const SpaceLock lock = shared.space().lock();
  for (const auto& [number, hbm, dram] : quotas) {
    shared.space().set_quota(number, Medium::kHbm, hbm);
    shared.space().set_quota(number, Medium::kDram, dram);
  }
}

}  // namespace

void bind_space(py::module_& module) {
  py::class_<SharedSpace, std::shared_ptr<SharedSpace>>(module, "Space", "The C++ half of kvpool.Space.")
      .def(py::init(&make_space), py::kw_only(), py::arg("unit_bytes"), py::arg("hbm_units"), py::arg("dram_units"),
           py::arg("models_max"), py::arg("copy_threads"), py::arg("huge_pages"), py::arg("numa_node"),
           py::arg("check_memory"))
      .def("_set_rules", &set_rules, py::arg("number"), py::arg("model"), py::arg("hbm"), py::arg("dram"))
      .def("_set_quotas", &set_quotas, py::arg("quotas"))
      .def(
          "_hold",
          [](const SharedSpace& shared, std::uint32_t number, bool held) {
            const GilReleased released;
            const SpaceLock lock = shared.space().lock();
            shared.space().hold_growth(number, held);
          },
          py::arg("number"), py::arg("held"))
      .def("_tiers", &tiers)
      .def("_counts", &counts, py::arg("medium"))
      .def("_metadata_bytes",
           [](const SharedSpace& shared) {
             std::uint64_t bytes = 0;
             for (const Medium medium : kMedia) bytes += shared.space().unit_set(medium).metadata_bytes();
             return bytes;
           })
      .def("_audit", [](const SharedSpace& shared) {
        const GilReleased released;
        const SpaceLock lock = shared.space().lock();
        shared.space().audit();
      });
  module.def("_plan_room", &plan_room, py::arg("tier"), py::arg("model"), py::arg("units"),
             py::arg("dram") = py::none(), "The plan of blocks/quotas.h, for a test against the one of the policies.");
}

}  // namespace kvpool::bindings
