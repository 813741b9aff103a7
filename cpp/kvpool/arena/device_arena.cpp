#include "kvpool/arena/device_arena.h"

#include <string>
#include <utility>

#include "kvpool/base/error.h"

namespace kvpool {
namespace {

std::string what_of(int device) { return "GPU " + std::to_string(device) + " cannot be used"; }

// REQUIRES: the context is current.
void check_is_on(const CudaContext& context, const std::byte* at, std::size_t segment) {
  const auto pointer = static_cast<CuPointer>(reinterpret_cast<std::uintptr_t>(at));
  const CudaDriver& driver = context.driver();
  int type = 0;
  int ordinal = -1;
  const bool known = driver.pointer_get_attribute(&type, kCuPointerMemoryType, pointer) == kCudaSuccess &&
                     driver.pointer_get_attribute(&ordinal, kCuPointerDeviceOrdinal, pointer) == kCudaSuccess;
  if (known && type == kCuMemoryTypeDevice && ordinal == context.ordinal()) return;
  throw Error(ErrorCode::kLayoutMismatch,
              "segment " + std::to_string(segment) + " is not memory of GPU " + std::to_string(context.ordinal()) +
                  (known && type == kCuMemoryTypeDevice ? ", but of GPU " + std::to_string(ordinal)
                                                        : std::string(": the CUDA driver does not know it as that")),
              {{"segment", static_cast<std::int64_t>(segment)}, {"device", context.ordinal()}});
}

}  // namespace

DeviceArena::DeviceArena(const DeviceArenaOptions& options) {
  const ArenaSize size = arena_size(options.blocks, options.segment_bytes);
  context_ = CudaContext::retain(options.device, what_of(options.device).c_str());
  medium_ = options.medium;
  blocks_ = options.blocks;
  block_bytes_ = size.block_bytes;
  std::byte* base = nullptr;
  if (size.payload_bytes > 0) {
    memory_ = std::make_unique<const DeviceMemory>(context_, size.payload_bytes, options.kind, options.check_memory);
    mapped_bytes_ = memory_->bytes();
    base = reinterpret_cast<std::byte*>(memory_->base());  // NOLINT(performance-no-int-to-ptr)
  }
  owned_ = memory_ != nullptr;
  segments_ = arena_segments(base, blocks_, options.segment_bytes);
}

std::shared_ptr<Arena> make_adopted_device_arena(Medium medium, std::uint32_t blocks, std::vector<Segment> segments,
                                                 std::shared_ptr<void> keepalive, int device) {
  const std::string what = what_of(device);
  std::shared_ptr<const CudaContext> context = CudaContext::retain(device, what.c_str());
  auto arena = make_adopted_arena(medium, blocks, std::move(segments), std::move(keepalive), context);
  const CurrentContext current(*context, what.c_str());
  for (std::size_t i = 0; blocks > 0 && i < arena->segments().size(); ++i) {
    const Segment& segment = arena->segments()[i];
    check_is_on(*context, segment.base, i);
    check_is_on(*context, segment.base + (blocks - 1) * segment.stride + segment.bytes - 1, i);
  }
  return arena;
}

}  // namespace kvpool
