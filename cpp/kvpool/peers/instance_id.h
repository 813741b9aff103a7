// A random instance id, for a pool that gets none from a directory. All ids of one process differ: with only 14 bits,
// random ids of hundreds of pools would soon collide.
#pragma once

#include <cstdint>

namespace kvpool {

// Thread-safety: any number of threads may call draw() and destroy objects; one thread at a time may use an object.
class InstanceId {
 public:
  // An id that is unused in this process. Throws Error kState when none is left.
  static InstanceId draw();
  InstanceId(InstanceId&& other) noexcept;
  InstanceId& operator=(InstanceId&& other) noexcept;  // gives back its old id
  ~InstanceId();

  std::uint32_t value() const noexcept { return value_; }

 private:
  explicit InstanceId(std::uint32_t value) noexcept : value_(value) {}
  std::uint32_t value_;  // 0: moved from
};

}  // namespace kvpool
