#include "kvpool/cuda/shared_memory.h"

#include <sys/mman.h>

#include <string>
#include <utility>

#include "kvpool/base/error.h"

namespace kvpool {
namespace {

constexpr const char* kImporting = "a peer's GPU memory cannot be mapped";
constexpr const char* kRegistering = "host memory cannot be made reachable for the GPU";

}  // namespace

ImportedMemory::ImportedMemory(std::shared_ptr<const CudaContext> context, int descriptor, std::size_t bytes)
    : context_(std::move(context)), bytes_(bytes) {
  const CurrentContext current(*context_, kImporting);
  const CudaDriver& driver = context_->driver();
  CuHandle handle = 0;
  // The driver takes the number of the descriptor as a pointer.
  void* const shareable = reinterpret_cast<void*>(static_cast<std::intptr_t>(descriptor));  // NOLINT
  driver.require(driver.mem_import(&handle, shareable, kCuHandlePosixFd), "cuMemImportFromShareableHandle", kImporting);
  try {
    driver.require(driver.mem_address_reserve(&base_, bytes_, 0, 0, 0), "cuMemAddressReserve", kImporting);
    driver.require(driver.mem_map(base_, bytes_, 0, handle, 0), "cuMemMap", kImporting);
    mapped_ = true;
    const CuMemAccess access{{kCuLocationDevice, context_->device()}, kCuAccessReadWrite};
    driver.require(driver.mem_set_access(base_, bytes_, &access, 1), "cuMemSetAccess", kImporting);
  } catch (...) {
    release();
    driver.mem_release(handle);
    throw;
  }
  // The mapping keeps the memory.
  driver.mem_release(handle);
}

ImportedMemory::~ImportedMemory() {
  const CurrentContext current(*context_);
  if (current) release();
}

// REQUIRES: the context is current. What the driver answers is of no use here.
void ImportedMemory::release() noexcept {
  const CudaDriver& driver = context_->driver();
  if (mapped_) driver.mem_unmap(base_, bytes_);
  if (base_ != 0) driver.mem_address_free(base_, bytes_);
}

std::byte* ImportedMemory::base() const noexcept {
  return reinterpret_cast<std::byte*>(base_);  // NOLINT(performance-no-int-to-ptr)
}

RegisteredMemory::RegisteredMemory(std::shared_ptr<const CudaContext> context, void* base, std::size_t bytes)
    : context_(std::move(context)), base_(base) {
  const CurrentContext current(*context_, kRegistering);
  const CudaDriver& driver = context_->driver();
  driver.require(driver.mem_host_register(base, bytes, kCuHostRegisterPortable), "cuMemHostRegister", kRegistering);
}

RegisteredMemory::~RegisteredMemory() {
  const CurrentContext current(*context_);
  if (current) context_->driver().mem_host_unregister(base_);
}

PinnedBuffer::PinnedBuffer(const std::shared_ptr<const CudaContext>& context, std::size_t bytes) : bytes_(bytes) {
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (mapped == MAP_FAILED) {
    throw Error(ErrorCode::kOutOfMemory, "no memory for a buffer of " + std::to_string(bytes) + " bytes",
                {{"needed_bytes", static_cast<std::int64_t>(bytes)}});
  }
  data_ = static_cast<std::byte*>(mapped);
  // A child would get copies of the pages, or this process would, and the GPU would go on with the others.
  madvise(data_, bytes, MADV_DONTFORK);
  try {
    registered_ = std::make_unique<RegisteredMemory>(context, data_, bytes);
  } catch (...) {
    munmap(data_, bytes);
    throw;
  }
}

PinnedBuffer::~PinnedBuffer() {
  // In a forked child there is no mapping, but there may be another one at its place.
  if (!registered_->usable()) return;
  registered_.reset();
  munmap(data_, bytes_);
}

}  // namespace kvpool
