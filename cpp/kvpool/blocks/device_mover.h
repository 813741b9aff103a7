// Copies whole blocks between an arena on a GPU and one in page-locked host memory, whatever the layout of each.
//
// Each direction has a stream of its own, so both can be under way at once, and neither holds up the model's streams.
// The order with those is by events: a copy begins on the GPU when the caller's stream has done what it had been given
// before the call. When a call returns its bytes have arrived, for every stream and for the CPU.
//
// How: many small pieces are one kernel that reads or writes the host's memory over the bus (cuda/kernels.h); few large
// ones go by the copy engines, in one call where the driver has it (cuMemcpyBatchAsync, CUDA 12.8). Never by way of a
// pageable buffer.
//
// Invariants
//   V1  No byte is read or written before what the caller's stream had been given by the time of the call has ended.
//   V2  When a call has returned, all of its bytes have arrived. When it has thrown, but for kDeviceLost, none of its
//       writes is still to come: its blocks may be given to somebody else.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "kvpool/arena/arena.h"
#include "kvpool/base/address.h"
#include "kvpool/base/strips.h"
#include "kvpool/cuda/kernels.h"
#include "kvpool/cuda/stream.h"

namespace kvpool {

enum class TierWay : std::uint8_t { kOut, kIn };  // from the GPU to the host, and back

// Thread-safety: all of it; calls of one direction go one after the other.
class DeviceMover {
 public:
  // Mean length of a piece up to which a kernel copies. Below, the copy engines are slower than the bus: each piece
  // costs them one to two microseconds.
  static constexpr std::size_t kKernelPieceBytesMax = std::size_t{256} << 10;

  // `kernels`: what copies small pieces; null: the copy engines copy them, too. Throws as CudaDriver::require.
  // REQUIRES: device.on_device(); the host arena is pinned, or has no blocks; equal block_bytes.
  DeviceMover(const Arena& device, const Arena& host, const cuda::KernelSet* kernels);
  DeviceMover(const DeviceMover&) = delete;
  DeviceMover& operator=(const DeviceMover&) = delete;

  // Copies block from[i] to block to[i] for i in [0, n). Throws Error: kArgument (`after` is no stream of this GPU),
  // kDeviceLost, kUnsupported, kOutOfMemory; std::bad_alloc. REQUIRES: no block stands twice in `to`.
  void move(TierWay way, const Address* from, const Address* to, std::size_t n, const CallerStream& after);
  // Fills blocks of the device arena with zeros, after all that the device is doing now. Throws as move().
  void zero(const Address* blocks, std::size_t n);

 private:
  struct Lane {
    explicit Lane(const std::shared_ptr<const CudaContext>& context) : stream(context) {}
    std::mutex mutex;
    CudaStream stream;
    std::vector<PlannedStrip> plan;
  };
  Lane& lane(TierWay way) noexcept { return *lanes_[static_cast<std::size_t>(way)]; }
  bool suits_kernel(const Lane& lane, const Address* from, const Address* to, std::size_t n) const noexcept;
  bool launch(Lane& lane, const Address* from, const Address* to, std::size_t n);
  void copy(Lane& lane, const Address* from, const Address* to, std::size_t n);
  void copy_batch(Lane& lane, std::span<const CopyPiece> pieces);
  bool copied_as_batch(Lane& lane, std::span<const CopyPiece> pieces);

  const std::shared_ptr<const CudaContext> context_;
  const cuda::KernelSet* const kernels_;
  std::atomic<bool> kernels_refused_{false};  // this GPU or its driver cannot run what was compiled
  std::atomic<bool> batches_refused_{false};  // has the call, and does not support it
  const std::vector<Segment> device_segments_;
  const std::size_t block_bytes_;
  std::array<std::unique_ptr<Lane>, 2> lanes_;  // by TierWay
};

}  // namespace kvpool
