// An arena on a GPU.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kvpool/arena/arena.h"
#include "kvpool/arena/device_memory.h"

namespace kvpool {

struct DeviceArenaOptions {
  Medium medium = Medium::kHbm;
  std::uint32_t blocks = 0;
  std::vector<std::size_t> segment_bytes;  // as of ArenaOptions
  int device = 0;
  DeviceMemoryKind kind = DeviceMemoryKind::kAuto;
  bool check_memory = true;  // refuse what does not fit into the memory that is free now
};

// Owned: allocated when the arena is made, with undefined content. blocks == 0 makes an arena without memory; it holds
// the context all the same, so a missing GPU is an error.
class DeviceArena final : public Arena {
 public:
  // Throws Error: kArgument as make_owned_arena, and as DeviceMemory. Leaves nothing behind.
  explicit DeviceArena(const DeviceArenaOptions& options);

  const DeviceMemory* device_memory() const noexcept override { return memory_.get(); }

 private:
  std::unique_ptr<const DeviceMemory> memory_;
};

// An engine's tensors on this GPU. Throws as make_adopted_arena, and kLayoutMismatch when, according to the driver, a
// segment is not memory of this GPU.
std::shared_ptr<Arena> make_adopted_device_arena(Medium medium, std::uint32_t blocks, std::vector<Segment> segments,
                                                 std::shared_ptr<void> keepalive, int device);

}  // namespace kvpool
