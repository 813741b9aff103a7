#include "kvpool/peers/instance_id.h"

#include <doctest/doctest.h>

#include <atomic>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "service_kit.h"
#include "thrown.h"

namespace kvpool::testing {
using namespace services;  // NOLINT(google-build-using-namespace)
namespace {

// All free ones, except those of pools that other tests have left.
std::vector<InstanceId> draw_all() {
  std::vector<InstanceId> ids;
  const auto refused = error_of([&] {
    for (;;) ids.push_back(InstanceId::draw());
  });
  CHECK(refused->code() == ErrorCode::kState);
  return ids;
}

}  // namespace

TEST_CASE("instance ids that are drawn differ, and can be drawn again after their return") {
  std::vector<InstanceId> ids = draw_all();
  std::set<std::uint32_t> values;
  for (const InstanceId& id : ids) values.insert(id.value());
  CHECK(values.size() == ids.size());
  CHECK(ids.size() > kInstanceMax / 2);
  CHECK(*values.begin() >= 1);
  CHECK(*values.rbegin() <= kInstanceMax);
  const std::uint32_t last = ids.back().value();
  ids.pop_back();
  CHECK(InstanceId::draw().value() == last);  // and it is given back at once
  InstanceId one = InstanceId::draw();
  CHECK(one.value() == last);
  one = std::move(ids.front());  // gives its own back
  CHECK(InstanceId::draw().value() == last);
}

TEST_CASE("threads that draw instance ids at once never get the same one") {
  constexpr std::size_t kThreads = 4;
  constexpr int kEach = 2000;
  std::vector<std::vector<InstanceId>> drawn(kThreads);
  std::vector<std::thread> threads;
  for (auto& ids : drawn) {
    threads.emplace_back([&ids] {
      for (int i = 0; i < kEach; ++i) ids.push_back(InstanceId::draw());
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::set<std::uint32_t> values;
  for (const auto& ids : drawn) {
    for (const InstanceId& id : ids) values.insert(id.value());
  }
  CHECK(values.size() == kThreads * kEach);
}

TEST_CASE("pools of one process never draw the same instance id") {
  std::vector<InstanceId> others = draw_all();
  std::set<std::uint32_t> left;
  for (int i = 0; i < 3; ++i) {
    left.insert(others.back().value());
    others.pop_back();
  }
  {
    std::vector<Node> nodes;
    std::set<std::uint32_t> taken;
    for (const char* name : {"a", "b", "c"}) {
      nodes.push_back(make_node(name));
      nodes.back().service.listen(unix_address());
      taken.insert(nodes.back().pool->instance());
    }
    CHECK(taken == left);
    CHECK(error_of([&] { make_node("d"); })->code() == ErrorCode::kState);
  }
  CHECK(left.contains(InstanceId::draw().value()));  // they went with the pools
}

}  // namespace kvpool::testing
