// An instance id that was drawn by chance, for a pool to which no directory gives one. No two of one process are the
// same: they are few enough (14 bits) that hundreds of pools would soon meet one with their own.
#pragma once

#include <cstdint>

namespace kvpool {

// Thread-safety: draw() and the destructor, as many at a time as you like; one object has one user.
class InstanceId {
 public:
  // One that nobody in this process has. Throws Error kState when none is left.
  static InstanceId draw();
  InstanceId(InstanceId&& other) noexcept;
  InstanceId& operator=(InstanceId&& other) noexcept;  // gives its own back
  ~InstanceId();

  std::uint32_t value() const noexcept { return value_; }

 private:
  explicit InstanceId(std::uint32_t value) noexcept : value_(value) {}
  std::uint32_t value_;  // 0: moved from
};

}  // namespace kvpool
