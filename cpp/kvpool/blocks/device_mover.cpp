#include "kvpool/blocks/device_mover.h"

#include <algorithm>

#include "kvpool/base/check.h"
#include "kvpool/base/error.h"

namespace kvpool {
namespace {

constexpr const char* kWhat = "blocks cannot be copied between the GPU and the host";

GpuWay way_of(TierWay way) noexcept { return way == TierWay::kOut ? GpuWay::kOut : GpuWay::kIn; }

CuPointer pointer(const std::byte* address) noexcept {
  return static_cast<CuPointer>(reinterpret_cast<std::uintptr_t>(address));
}

}  // namespace

std::unique_ptr<DeviceMover> DeviceMover::make(const Arena& device, const Arena& host) {
  const cuda::KernelSet* const kernels = kernels_for(*device.context());
  const CopyBounds bounds = kernels != nullptr ? measured_copy_bounds(device.context(), *kernels) : CopyBounds{};
  return std::make_unique<DeviceMover>(device, host, kernels, bounds);
}

DeviceMover::DeviceMover(const Arena& device, const Arena& host, const cuda::KernelSet* kernels,
                         const CopyBounds& bounds)
    : context_(device.context()),
      device_segments_(device.segments()),
      copier_(context_, kernels, bounds, kBusThreadBlocks, kWhat) {
  KVPOOL_CHECK(device.on_device() && device.block_bytes() == host.block_bytes());
  KVPOOL_CHECK(host.pinned() || host.blocks() == 0);
  const CurrentContext current(*context_, kWhat);
  for (auto& direction : directions_) direction = std::make_unique<Direction>(context_);
  const BlockStrip whole{0, 0, device.block_bytes()};
  const MediumSpan on_device{device.blocks(), device.segments()};
  const MediumSpan on_host{host.blocks(), host.segments()};
  plan_strips(on_device, on_host, std::span(&whole, 1), true, direction(TierWay::kOut).plan);
  plan_strips(on_host, on_device, std::span(&whole, 1), true, direction(TierWay::kIn).plan);
  // One launch for as many blocks as both sides have. Longer pieces go by the copy engines.
  for (const TierWay way : {TierWay::kOut, TierWay::kIn}) {
    Direction& own = direction(way);
    if (own.plan.empty() || device.block_bytes() / own.plan.size() > bounds.of(way_of(way))) continue;
    const std::size_t bytes = copier_.table_bytes(own.plan.size(), std::min(device.blocks(), host.blocks()));
    if (bytes > 0) own.stream.add_table(bytes);
  }
}

std::size_t DeviceMover::device_bytes() const noexcept {
  return directions_[0]->stream.table_bytes() + directions_[1]->stream.table_bytes();
}

void DeviceMover::move(TierWay way, const Address* from, const Address* to, std::size_t n, const CopyOrder& after) {
  if (n == 0) return;
  Direction& own = direction(way);
  const std::lock_guard lock(own.mutex);
  const CurrentContext current(*context_, kWhat);
  own.stream.follow(after);
  try {
    copier_.copy(own.stream.handle(), way_of(way), own.plan, {from, n}, {to, n}, /*merge=*/true, own.stream.table());
  } catch (...) {
    // What is under way already must not write into blocks that are somebody else's by then.
    own.stream.drain(kWhat);
    throw;
  }
  own.stream.drain(kWhat);
}

void DeviceMover::zero(const Address* blocks, std::size_t n) {
  constexpr const char* kZeroing = "blocks of the GPU cannot be zeroed";
  if (n == 0) return;
  Direction& own = direction(TierWay::kIn);
  const std::lock_guard lock(own.mutex);
  const CurrentContext current(*context_, kZeroing);
  own.stream.follow(std::nullopt);
  const CudaDriver& driver = context_->driver();
  try {
    for (std::size_t i = 0; i < n; ++i) {
      for (const Segment& segment : device_segments_) {
        driver.require(driver.memset_async(pointer(segment.base + block_of(blocks[i]) * segment.stride), 0,
                                           segment.bytes, own.stream.handle()),
                       "cuMemsetD8Async", kZeroing);
      }
    }
  } catch (...) {
    own.stream.drain(kZeroing);
    throw;
  }
  own.stream.drain(kZeroing);
}

}  // namespace kvpool
