#include "kvpool/peers/instance_id.h"

#include <bitset>
#include <mutex>
#include <random>
#include <utility>

#include "kvpool/base/address.h"
#include "kvpool/base/error.h"

namespace kvpool {
namespace {

struct Drawn {
  std::mutex mutex;
  std::bitset<kInstanceMax + 1> ids;
};

Drawn& drawn() {
  static auto* const instance = new Drawn;  // never destroyed: pools may outlive static objects
  return *instance;
}

}  // namespace

InstanceId InstanceId::draw() {
  std::uint32_t id = std::random_device()() % kInstanceMax + 1;
  const std::lock_guard lock(drawn().mutex);
  for (std::uint32_t tried = 0; tried < kInstanceMax; ++tried, id = id % kInstanceMax + 1) {
    if (drawn().ids[id]) continue;
    drawn().ids[id] = true;
    return InstanceId(id);
  }
  throw Error(ErrorCode::kState,
              "all " + std::to_string(kInstanceMax) + " instance ids are those of pools of this process",
              {{"maximum", kInstanceMax}});
}

InstanceId::InstanceId(InstanceId&& other) noexcept : value_(std::exchange(other.value_, 0)) {}

InstanceId& InstanceId::operator=(InstanceId&& other) noexcept {
  std::swap(value_, other.value_);
  const InstanceId given_back(std::exchange(other.value_, 0));
  return *this;
}

InstanceId::~InstanceId() {
  if (value_ == 0) return;
  const std::lock_guard lock(drawn().mutex);
  drawn().ids[value_] = false;
}

}  // namespace kvpool
