// A GPU of the fake driver with the kernels of cuda/, compiled for the CPU: for the cases of kernel_cases.h.
#pragma once

#include "fake_driver.h"

#ifdef KVPOOL_FAKE_CUDA

#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "fake_paths.h"
#include "kvpool/cuda/context.h"
#include "kvpool/cuda/stream_copier.h"

namespace kvpool::testing {

inline constexpr bool kOnCpu = true;

// GPU 0, whose context is current while this lives. One at a time.
class GpuHere {
 public:
  GpuHere() {
    setenv("FAKE_CUDA_KERNELS", host_kernels_path(), 1);
    context_ = CudaContext::retain(0, "a test");
    current_.emplace(*context_, "a test");
    here() = this;
  }
  ~GpuHere() {
    here() = nullptr;
    current_.reset();
    context_.reset();
    unsetenv("FAKE_CUDA_KERNELS");
    CHECK(cuda_.left() == "");
  }
  GpuHere(const GpuHere&) = delete;
  GpuHere& operator=(const GpuHere&) = delete;

  static GpuHere*& here() {
    static GpuHere* gpu = nullptr;
    return gpu;
  }
  const FakeCuda& fake() const { return cuda_; }
  const std::shared_ptr<const CudaContext>& context() const { return context_; }
  const CudaDriver& driver() const { return context_->driver(); }

 private:
  const FakeCuda cuda_;
  std::shared_ptr<const CudaContext> context_;
  std::optional<CurrentContext> current_;
};

inline const cuda::KernelSet& kernels() {
  const cuda::KernelSet* found = kernels_for(*GpuHere::here()->context());
  REQUIRE(found != nullptr);
  return *found;
}

inline CuPointer pointer_to(const std::byte* at) {
  return static_cast<CuPointer>(reinterpret_cast<std::uintptr_t>(at));
}

enum class Where : std::uint8_t { kDevice, kPinned };

// Memory that a kernel reads or writes: exactly so long.
class Shared {
 public:
  Shared(std::size_t bytes, Where where) : bytes_(bytes), where_(where) {
    const CudaDriver& driver = GpuHere::here()->driver();
    if (where == Where::kDevice) {
      CuPointer address = 0;
      REQUIRE(driver.mem_alloc(&address, bytes) == 0);
      at_ = reinterpret_cast<std::byte*>(address);  // NOLINT(performance-no-int-to-ptr)
    } else {
      at_ = static_cast<std::byte*>(::operator new(bytes, std::align_val_t{256}));
      REQUIRE(driver.mem_host_register(at_, bytes, kCuHostRegisterPortable) == 0);
    }
  }
  ~Shared() {
    const CudaDriver& driver = GpuHere::here()->driver();
    if (where_ == Where::kDevice) {
      CHECK(driver.mem_free(pointer_to(at_)) == 0);
    } else {
      CHECK(driver.mem_host_unregister(at_) == 0);
      ::operator delete(at_, std::align_val_t{256});
    }
  }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;

  std::byte* data() const noexcept { return at_; }
  std::size_t size() const noexcept { return bytes_; }
  void set(const std::vector<std::byte>& content) const {
    std::memcpy(GpuHere::here()->fake().host(at_, content.size()), content.data(), content.size());
  }
  std::vector<std::byte> get() const {
    const std::byte* content = GpuHere::here()->fake().host(at_, bytes_);
    return {content, content + bytes_};
  }

 private:
  const std::size_t bytes_;
  const Where where_;
  std::byte* at_ = nullptr;
};

class GpuStream {
 public:
  GpuStream() { REQUIRE(driver_.stream_create(&stream_, kCuStreamNonBlocking) == 0); }
  ~GpuStream() { static_cast<void>(driver_.stream_destroy(stream_)); }
  GpuStream(const GpuStream&) = delete;
  GpuStream& operator=(const GpuStream&) = delete;

  CuStream get() const noexcept { return stream_; }
  void wait() const { REQUIRE(driver_.stream_synchronize(stream_) == 0); }
  // Into the stream, both.
  void fill(std::byte* at, int value, std::size_t bytes) const {
    REQUIRE(driver_.memset_async(pointer_to(at), static_cast<unsigned char>(value), bytes, stream_) == 0);
  }
  void copy(std::byte* to, const std::byte* from, std::size_t bytes) const {
    REQUIRE(driver_.memcpy_async(pointer_to(to), pointer_to(from), bytes, stream_) == 0);
  }

 private:
  const CudaDriver& driver_ = GpuHere::here()->driver();
  CuStream stream_ = nullptr;
};

}  // namespace kvpool::testing

#endif  // KVPOOL_FAKE_CUDA
