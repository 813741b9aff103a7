#include "kvpool/routes/ucx/ucx_memory.h"

#include <algorithm>
#include <iterator>
#include <limits>

#include "kvpool/routes/ucx/ucx_devices.h"

namespace kvpool {
namespace {

constexpr std::uint32_t kBlobVersion = 1;
constexpr std::size_t kAddressBytesMax = 64 << 10;
constexpr std::size_t kKeyBytesMax = 16 << 10;
constexpr std::size_t kRegionsMax = 1 << 16;
constexpr std::size_t kVersionBytesMax = 64;
// More than UCX reads behind the end of an address or key whose fields are wrong: their lengths have one byte each.
constexpr std::size_t kPadding = 64 << 10;

[[noreturn]] void malformed(const std::string& what) {
  throw Error(ErrorCode::kProtocol, "the peer's metadata is malformed: " + what);
}

}  // namespace

std::vector<UcxExtent> ucx_extents(const MediumSpan& span, bool by_segment) {
  std::vector<UcxExtent> extents;
  if (span.blocks == 0) return extents;
  std::vector<UcxExtent> found;
  found.reserve(span.segments.size());
  for (const Segment& segment : span.segments) {
    found.push_back({reinterpret_cast<std::uint64_t>(segment.base),
                     std::uint64_t{span.blocks - 1} * segment.stride + segment.bytes});
  }
  std::sort(found.begin(), found.end(), [](const UcxExtent& a, const UcxExtent& b) { return a.base < b.base; });
  for (const UcxExtent& extent : found) {
    const std::uint64_t end = extents.empty() ? 0 : extents.back().base + extents.back().bytes;
    if (extent.base < end || (extent.base == end && !by_segment)) {
      UcxExtent& last = extents.back();
      last.bytes = std::max(last.bytes, extent.base + extent.bytes - last.base);
    } else {
      extents.push_back(extent);
    }
  }
  return extents;
}

UcxMemory::UcxMemory(const UcxLibrary& ucx, ucp_context_h context, const UcxLocal& local)
    : ucx_(ucx), context_(context), spans_(local.spans) {
  std::vector<Region> mapped;
  try {
    for (std::size_t i = 0; i < spans_.size(); ++i) {
      const std::optional<UcxGpuMemory>& gpu = local.on_gpu[i];
      if (spans_[i].blocks == 0) continue;
      if (gpu) refused_[i] = why_not_by_ucx(ucx_, context_, *gpu);
      if (!refused_[i].empty()) {
        spans_[i] = {};
        continue;
      }
      try {
        const bool by_segment = gpu == UcxGpuMemory::kTensors;
        for (const UcxExtent& extent : ucx_extents(spans_[i], by_segment)) map(extent, gpu.has_value(), mapped);
        regions_.insert(regions_.end(), std::make_move_iterator(mapped.begin()), std::make_move_iterator(mapped.end()));
        mapped.clear();
        on_gpu_[i] = gpu.has_value();
        gives_handles_ = gives_handles_ || (gpu && *gpu != UcxGpuMemory::kVirtual);
      } catch (const Error& error) {
        if (!gpu) throw;
        unmap(mapped);
        refused_[i] = error.what();
        spans_[i] = {};
      }
    }
  } catch (...) {
    unmap(mapped);
    unmap(regions_);
    throw;
  }
  std::sort(regions_.begin(), regions_.end(), [](const Region& a, const Region& b) { return a.base < b.base; });
}

UcxMemory::~UcxMemory() { unmap(regions_); }

void UcxMemory::map(const UcxExtent& extent, bool on_gpu, std::vector<Region>& out) {
  ucp_mem_map_params_t params{};
  params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH;
  params.address = reinterpret_cast<void*>(extent.base);
  params.length = extent.bytes;
  if (on_gpu) {
    params.field_mask |= UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
    params.memory_type = UCS_MEMORY_TYPE_CUDA;
  }
  out.reserve(out.size() + 1);  // what is mapped is noted
  ucp_mem_h handle = nullptr;
  ucx_.require(ucx_.mem_map(context_, &params, &handle), "ucp_mem_map");
  out.push_back({extent.base, extent.bytes, handle, {}, on_gpu});
  void* key = nullptr;
  std::size_t key_bytes = 0;
  ucx_.require(ucx_.rkey_pack(context_, handle, &key, &key_bytes), "ucp_rkey_pack");
  const auto* first = static_cast<const std::byte*>(key);
  out.back().key.assign(first, first + key_bytes);
  ucx_.rkey_buffer_release(key);
}

void UcxMemory::unmap(std::vector<Region>& regions) noexcept {
  for (const Region& region : regions) ucx_.mem_unmap(context_, region.handle);
  regions.clear();
}

const UcxMemory::Region* UcxMemory::find(const void* address) const noexcept {
  const auto at = reinterpret_cast<std::uint64_t>(address);
  const auto next = std::upper_bound(regions_.begin(), regions_.end(), at,
                                     [](std::uint64_t value, const Region& region) { return value < region.base; });
  if (next == regions_.begin()) return nullptr;
  const Region& region = *(next - 1);
  return at - region.base < region.bytes ? &region : nullptr;
}

Bytes write_ucx_blob(const std::string& ucx_version, std::span<const std::byte> address,
                     std::span<const UcxMemory::Region> regions) {
  Bytes out;
  WireWriter writer(out);
  writer.number(kBlobVersion).text(ucx_version).blob(address).number(static_cast<std::uint32_t>(regions.size()));
  for (const UcxMemory::Region& region : regions) writer.number(region.base).number(region.bytes).blob(region.key);
  return out;
}

Bytes ucx_padded(std::span<const std::byte> bytes) {
  Bytes out(bytes.size() + kPadding);
  std::copy(bytes.begin(), bytes.end(), out.begin());
  return out;
}

UcxBlob read_ucx_blob(std::span<const std::byte> bytes) {
  WireReader reader(bytes);
  const auto version = reader.number<std::uint32_t>();
  if (version != kBlobVersion) malformed("its ucx part has version " + std::to_string(version));
  UcxBlob blob;
  blob.ucx_version = reader.text(kVersionBytesMax);
  const auto address = reader.blob(kAddressBytesMax);
  if (address.empty()) malformed("its ucx part has no address");
  blob.address.assign(address.begin(), address.end());
  const std::size_t count = reader.number<std::uint32_t>();
  if (count > kRegionsMax) malformed(std::to_string(count) + " regions");
  std::uint64_t end = 0;
  for (std::size_t i = 0; i < count; ++i) {
    UcxBlob::Region region{};
    region.base = reader.number<std::uint64_t>();
    region.bytes = reader.number<std::uint64_t>();
    const auto key = reader.blob(kKeyBytesMax);
    region.key.assign(key.begin(), key.end());
    if (key.empty() || region.bytes == 0 || region.base < end || region.base == 0 ||
        region.bytes > std::numeric_limits<std::uint64_t>::max() - region.base) {
      malformed("region " + std::to_string(i) + " of its ucx part is empty, wraps around or overlaps");
    }
    end = region.base + region.bytes;
    blob.regions.push_back(std::move(region));
  }
  reader.finish();
  return blob;
}

namespace {

bool is_covered(const MetadataSegment& segment, std::uint32_t blocks, const UcxBlob& blob) {
  std::uint64_t bytes = 0;
  const bool wraps = __builtin_mul_overflow(std::uint64_t{blocks - 1}, segment.stride, &bytes) ||
                     __builtin_add_overflow(bytes, segment.bytes, &bytes);
  const auto next =
      std::upper_bound(blob.regions.begin(), blob.regions.end(), segment.address,
                       [](std::uint64_t value, const UcxBlob::Region& region) { return value < region.base; });
  return !wraps && next != blob.regions.begin() && segment.address - (next - 1)->base <= (next - 1)->bytes &&
         bytes <= (next - 1)->bytes - (segment.address - (next - 1)->base);
}

}  // namespace

MediaSet require_covered(const PeerMetadata& metadata, const UcxBlob& blob) {
  MediaSet reach{};
  for (std::size_t i = 0; i < reach.size(); ++i) {
    const MetadataMedium& medium = metadata.media[i];
    if (medium.blocks == 0) continue;
    const auto covered = std::ranges::count_if(
        medium.segments, [&](const MetadataSegment& segment) { return is_covered(segment, medium.blocks, blob); });
    reach[i] = covered == std::ssize(medium.segments);
    if (!reach[i] && (covered > 0 || medium.kind == MemoryKind::kHost)) {
      malformed("blocks lie outside of the memory that its ucx keys open");
    }
  }
  return reach;
}

}  // namespace kvpool
