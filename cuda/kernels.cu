// The kernels: one for each width of a unit and each place where a table can be. What they do is in tile.h; here is how
// it is launched.
#include <cuda_runtime_api.h>

#include <access.cuh>  // in angle brackets, so that the tests can put another one in its place
#include <algorithm>

#include "kvpool/cuda/gpu_launch.h"

namespace kvpool::cuda {
namespace {

// Resident on a multiprocessor: 40 warps of 2 KiB each in flight are several times what its share of the memory's rate
// times its latency comes to.
constexpr unsigned kResident = 5;

// Up to here a launch costs what any launch costs; the larger ones have all their arguments copied.
constexpr std::size_t kSmallTableBytes = 4000;
static_assert(sizeof(InlineTable<kSmallTableBytes>) <= 4096);
static_assert(sizeof(InlineTable<kInlineTableBytes>) <= 32764, "the limit of a kernel's arguments, from sm_70 on");

// A table in the device's memory.
struct RemoteTable {
  TableHeader header;
  const unsigned char* data;
};

template <std::size_t kBytes>
__device__ TableView view_of(const InlineTable<kBytes>& table) {
  return {&table.header, table.data};
}
__device__ TableView view_of(const RemoteTable& table) {
  return {&table.header, table_in_memory(table.header, table.data)};
}

template <class Table, class Work>
__global__ void __launch_bounds__(kBlockThreads, kResident) run_tiles(const __grid_constant__ Table table) {
  StreamingMemory memory;
  run_thread<Work>(view_of(table), blockIdx.x, gridDim.x, threadIdx.x, memory);
}

template <class Work>
cudaError_t launch_work(const TableLaunch& launch, cudaStream_t stream, unsigned blocks) {
  const auto start = [&](const auto* table, auto kernel) {
    void* arguments[] = {const_cast<void*>(static_cast<const void*>(table))};
    return cudaLaunchKernel(kernel, dim3{blocks, 1, 1}, dim3{kBlockThreads, 1, 1}, arguments, 0, stream);
  };
  if (launch.device_data != nullptr) {
    if (launch.device_data != launch.data) {
      const cudaError_t copied =
          cudaMemcpyAsync(launch.device_data, launch.data, launch.data_bytes, cudaMemcpyHostToDevice, stream);
      if (copied != cudaSuccess) return copied;
    }
    const RemoteTable table{*launch.header, reinterpret_cast<const unsigned char*>(launch.device_data)};
    return start(&table, &run_tiles<RemoteTable, Work>);
  }
  // The header begins an InlineTable, and the runtime copies as much of it as the kernel takes.
  using Small = InlineTable<kSmallTableBytes>;
  using Large = InlineTable<kInlineTableBytes>;
  static_assert(offsetof(Small, data) == offsetof(Large, data));
  if (launch.data_bytes <= kSmallTableBytes) {
    return start(reinterpret_cast<const Small*>(launch.header), &run_tiles<Small, Work>);
  }
  return start(reinterpret_cast<const Large*>(launch.header), &run_tiles<Large, Work>);
}

// What the runtime tells of a kernel it knows only when that is loaded.
template <class Work>
cudaError_t load_work() {
  cudaFuncAttributes attributes;
  const void* const kernels[] = {
      reinterpret_cast<const void*>(&run_tiles<RemoteTable, Work>),
      reinterpret_cast<const void*>(&run_tiles<InlineTable<kSmallTableBytes>, Work>),
      reinterpret_cast<const void*>(&run_tiles<InlineTable<kInlineTableBytes>, Work>),
  };
  for (const void* kernel : kernels) {
    const cudaError_t result = cudaFuncGetAttributes(&attributes, kernel);
    if (result != cudaSuccess) return result;
  }
  return cudaSuccess;
}

}  // namespace

int load_on_gpu() noexcept {
  cudaError_t result = cudaSuccess;
  for (const std::uint32_t width : {16u, 4u, 1u}) {
    with_work(width, [&]<class Work>(Work) {
      if (result == cudaSuccess) result = load_work<Work>();
    });
  }
  if (result != cudaSuccess) cudaGetLastError();  // as below
  return static_cast<int>(result);
}

int launch_on_gpu(const TableLaunch& launch, Stream stream, std::uint32_t thread_blocks_max) noexcept {
  int device = 0;
  int multiprocessors = 0;
  cudaError_t result = cudaGetDevice(&device);
  if (result == cudaSuccess) {
    result = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (result == cudaSuccess) {
    unsigned blocks = (launch.header->tiles + kBlockWarps - 1) / kBlockWarps;
    blocks = std::min(blocks, static_cast<unsigned>(multiprocessors) * kResident);
    if (thread_blocks_max != 0) blocks = std::min(blocks, thread_blocks_max);
    result = cudaErrorInvalidValue;  // no such kernel
    with_work(launch.width,
              [&]<class Work>(Work) { result = launch_work<Work>(launch, static_cast<cudaStream_t>(stream), blocks); });
  }
  if (result != cudaSuccess) cudaGetLastError();  // told by the return value: nobody finds it again later
  return static_cast<int>(result);
}

const char* gpu_result_name(int result) { return cudaGetErrorName(static_cast<cudaError_t>(result)); }

}  // namespace kvpool::cuda
