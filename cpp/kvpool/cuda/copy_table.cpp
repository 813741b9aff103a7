#include "kvpool/cuda/copy_table.h"

#include <algorithm>

#include "kvpool/base/error.h"

namespace kvpool {
namespace {

constexpr std::size_t kPageBytes = 4096;

}  // namespace

std::unique_ptr<CopyTable> CopyTable::make(const std::shared_ptr<const CudaContext>& context, std::size_t bytes) {
  const std::size_t pages = (std::min(bytes, kBytesMax) + kPageBytes - 1) / kPageBytes;
  try {
    return std::unique_ptr<CopyTable>(new CopyTable(context, pages * kPageBytes));
  } catch (const Error& error) {
    // What may be page-locked has a limit, too, and drivers have several words for that.
    if (error.code() != ErrorCode::kOutOfMemory && error.code() != ErrorCode::kUnsupported) throw;
    return nullptr;
  }
}

CopyTable::CopyTable(const std::shared_ptr<const CudaContext>& context, std::size_t bytes)
    : context_(context), host_(context, bytes) {
  constexpr const char* kWhat = "no memory of the GPU for descriptions of copies";
  const CurrentContext current(*context_, kWhat);
  context_->driver().require(context_->driver().mem_alloc(&device_, bytes), "cuMemAlloc", kWhat);
}

CopyTable::~CopyTable() {
  const CurrentContext current(*context_);
  if (current) context_->driver().mem_free(device_);
}

cuda::TableSpace CopyTable::take(std::size_t bytes) noexcept {
  const std::size_t length = length_of(bytes);
  if (length < bytes || length > this->bytes() - taken_) return {};
  const cuda::TableSpace space{
      host_.data() + taken_,
      reinterpret_cast<std::byte*>(device_) + taken_,  // NOLINT(performance-no-int-to-ptr)
      length,
  };
  taken_ += length;
  return space;
}

}  // namespace kvpool
