// Kernels as on a GPU, over the fake driver: a job is cut into launches by the planner, and what a launch does
// it reads from its table when the stream comes to it: from the launch itself, or from the GPU's memory.
#pragma once

#include "device_kit.h"

#ifdef KVPOOL_FAKE_CUDA

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

#include "kvpool/cuda/kernel_plan.h"

namespace kvpool::testing {

class TableKernels {
 public:
  explicit TableKernels(const FakeCuda& cuda) {
    fake() = &cuda;
    launches() = 0;
    by_table() = 0;
    fail_launch() = 0;
  }
  ~TableKernels() { fake() = nullptr; }
  TableKernels(const TableKernels&) = delete;
  TableKernels& operator=(const TableKernels&) = delete;

  const cuda::KernelSet& set() const { return set_; }
  static std::atomic<int>& launches() {
    static std::atomic<int> count{0};
    return count;
  }
  // Of these, how many read their table in the GPU's memory.
  static std::atomic<int>& by_table() {
    static std::atomic<int> count{0};
    return count;
  }
  // The result of a launch from now on, once its table has been copied.
  static std::atomic<int>& fail_launch() {
    static std::atomic<int> code{0};
    return code;
  }

 private:
  // A launch in a stream.
  struct Work {
    cuda::TableHeader header;
    std::uint32_t width;
    std::vector<std::byte> data;  // empty: in the GPU's memory
    const std::byte* device_data;
    std::size_t data_bytes;

    void run() const {
      const std::byte* table = device_data != nullptr ? fake()->host(device_data, data_bytes) : data.data();
      const cuda::TableView view{&header, reinterpret_cast<const unsigned char*>(table)};
      const std::size_t pairs = (data_bytes - cuda::table_bytes(header.strips, 0)) / sizeof(cuda::DevicePair);
      for (std::size_t p = 0; p < pairs; ++p) {
        const cuda::DevicePair& pair = view.pairs()[p];
        for (std::uint32_t s = 0; s < header.strips; ++s) {
          const cuda::DeviceStrip& strip = view.strips()[s];
          const std::size_t bytes = strip.units * width + strip.tail;
          const auto at = [&](std::uint64_t address) {
            return fake()->host(reinterpret_cast<const std::byte*>(address), bytes);
          };
          std::memcpy(at(strip.to + pair.to * strip.to_stride), at(strip.from + pair.from * strip.from_stride), bytes);
        }
      }
    }
  };

  static const FakeCuda*& fake() {
    static const FakeCuda* cuda = nullptr;
    return cuda;
  }
  static int copy(const cuda::CopyJob& job, cuda::Stream stream, const cuda::LaunchOptions& options) {
    return launch_job(job, options.table, &launch, stream);
  }
  static int launch(void* stream, const cuda::TableLaunch& launch) {
    auto work = std::make_unique<Work>(Work{*launch.header, launch.width, {}, launch.device_data, launch.data_bytes});
    if (launch.device_data != nullptr) {
      const auto address = [](const std::byte* at) {
        return static_cast<CuPointer>(reinterpret_cast<std::uintptr_t>(at));
      };
      using Copy = int(CuPointer, CuPointer, std::size_t, CuStream);
      const int copied = fake()->find<Copy>("cuMemcpyAsync")(address(launch.device_data), address(launch.data),
                                                             launch.data_bytes, stream);
      if (copied != 0) return copied;
      ++by_table();
    } else {
      work->data.assign(launch.data, launch.data + launch.data_bytes);
    }
    ++launches();
    if (fail_launch() != 0) return fail_launch();
    const auto call = [](void* argument) { std::unique_ptr<Work>(static_cast<Work*>(argument))->run(); };
    using Launch = int(CuStream, void (*)(void*), void*);
    const int code = fake()->find<Launch>("cuLaunchHostFunc")(stream, call, work.get());
    if (code == 0) static_cast<void>(work.release());
    return code;
  }

  cuda::KernelSet set_{"table", &copy, nullptr, nullptr};
};

}  // namespace kvpool::testing

#endif  // KVPOOL_FAKE_CUDA
