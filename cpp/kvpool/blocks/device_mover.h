// Copies whole blocks between an arena on a GPU and one in page-locked host memory, whatever the layout of each.
//
// Each direction has its own stream, so both can be under way at once, and neither delays the model's streams. Events
// order the copies after the model's work: a copy begins on the GPU when the caller's stream has finished what it was
// given before the call. When a call returns, every stream and the CPU see its bytes.
//
// How: stream_copier.h. Never through a pageable buffer.
//
// Invariants
//   V1  No byte is read or written before the work that the caller's stream had been given before the call has ended.
//   V2  When a call has returned, all of its bytes have arrived. When it has thrown anything but kDeviceLost, it writes
//       no more, so its blocks may get another owner.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "kvpool/arena/arena.h"
#include "kvpool/base/address.h"
#include "kvpool/base/strips.h"
#include "kvpool/cuda/copy_stream.h"
#include "kvpool/cuda/stream_copier.h"

namespace kvpool {

enum class TierWay : std::uint8_t { kOut, kIn };  // from the GPU to the host, and back

// Thread-safety: all of it; calls of one direction run one after another.
class DeviceMover {
 public:
  // `kernels` copy small pieces; null: the copy engines copy those, too. `bounds`: which pieces are small. Throws as
  // CudaDriver::require. REQUIRES: device.on_device(); the host arena is pinned, or has no blocks; equal block_bytes.
  DeviceMover(const Arena& device, const Arena& host, const cuda::KernelSet* kernels, const CopyBounds& bounds = {});
  // Uses the kernels of this build, if this GPU can run them, and its measured bounds. Throws the same, and as
  // kernels_for().
  static std::unique_ptr<DeviceMover> make(const Arena& device, const Arena& host);
  DeviceMover(const DeviceMover&) = delete;
  DeviceMover& operator=(const DeviceMover&) = delete;

  // Copies block from[i] to block to[i] for i in [0, n). Throws Error: kArgument (`after` is a stream of another GPU),
  // kDeviceLost, kUnsupported, kOutOfMemory; std::bad_alloc. REQUIRES: `to` has no duplicates.
  void move(TierWay way, const Address* from, const Address* to, std::size_t n, const CopyOrder& after);
  // Fills blocks of the device arena with zeros, after all current work of the device. Throws as move().
  void zero(const Address* blocks, std::size_t n);
  // GPU memory that this has allocated for itself.
  std::size_t device_bytes() const noexcept;

 private:
  struct Direction {
    explicit Direction(const std::shared_ptr<const CudaContext>& context) : stream(context) {}
    std::mutex mutex;
    CopyStream stream;
    std::vector<PlannedStrip> plan;
  };
  Direction& direction(TierWay way) noexcept { return *directions_[static_cast<std::size_t>(way)]; }

  const std::shared_ptr<const CudaContext> context_;
  const std::vector<Segment> device_segments_;
  StreamCopier copier_;
  std::array<std::unique_ptr<Direction>, 2> directions_;  // by TierWay
};

}  // namespace kvpool
