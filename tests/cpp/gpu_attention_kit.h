// Attention over blocks in the memory of a fake GPU. What its kernels do is said here by the CPU's kernels, from the
// same tables: so the parts must have the bits that attend() has with the portable kernel.
#pragma once

#include "fake_driver.h"

#ifdef KVPOOL_FAKE_CUDA

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "attention_kit.h"
#include "fake_cubin.h"
#include "kvpool/attend_gpu/gpu_attention.h"
#include "kvpool/attention/kernel.h"
#include "kvpool/attention/merge_rows.h"
#include "kvpool/attention/number_formats.h"
#include "kvpool/cuda/context.h"

namespace kvpool::testing {

inline constexpr int kIllegalAddress = 700;
inline constexpr std::uint32_t kLeafRows = 16;
inline constexpr std::uint32_t kMergeRows = 8;

template <class Arguments>
Arguments arguments_of(const fake_cuda::FakeLaunch& launch) {
  Arguments arguments;
  REQUIRE(launch.parameters.size() >= sizeof(Arguments));
  std::memcpy(&arguments, launch.parameters.data(), sizeof(Arguments));
  return arguments;
}

template <class T>
T* reached(const fake_cuda::FakeLaunch& launch, CuPointer address, std::size_t count) {
  return reinterpret_cast<T*>(launch.at(address, count * sizeof(T)));
}

// attend_leaves, for one type and dimension.
class LeavesByCpu {
 public:
  LeavesByCpu(DType dtype, std::uint32_t head_dim) : dtype_(dtype), dim_(head_dim) {}

  int operator()(const fake_cuda::FakeLaunch& launch) const {
    const auto arguments = arguments_of<LeafArguments>(launch);
    const auto* tasks = reached<LeafTask>(launch, arguments.tasks, launch.grid[0]);
    if (tasks == nullptr) return kIllegalAddress;
    for (unsigned leaf = 0; leaf < launch.grid[0]; ++leaf) {
      for (unsigned head = 0; head < launch.grid[1]; ++head) {
        for (unsigned z = 0; z < launch.grid[2]; ++z) {
          if (!run(launch, arguments, tasks[leaf], head, z * kLeafRows)) return kIllegalAddress;
        }
      }
    }
    return 0;
  }

 private:
  bool run(const fake_cuda::FakeLaunch& launch, const LeafArguments& arguments, const LeafTask& task, unsigned head,
           std::uint32_t first_row) const {
    const std::size_t size = dtype_bytes(dtype_);
    const auto tokens = static_cast<std::uint32_t>(task.query_tokens);
    const std::uint32_t rows = static_cast<std::uint32_t>(arguments.group) * tokens;
    if (first_row >= rows) return true;
    std::vector<float> q(std::size_t{rows} * dim_);
    for (std::uint32_t row = 0; row < rows; ++row) {
      const std::uint32_t query_head = head * static_cast<std::uint32_t>(arguments.group) + row / tokens;
      const std::uint64_t at =
          static_cast<std::uint64_t>(task.q_at) +
          (std::uint64_t{row % tokens} * static_cast<std::uint32_t>(arguments.query_heads) + query_head) * dim_;
      const auto* from = reached<std::byte>(launch, arguments.q + at * size, dim_ * size);
      if (from == nullptr) return false;
      to_floats(dtype_, from, dim_, &q[std::size_t{row} * dim_]);
      for (std::uint32_t d = 0; d < dim_; ++d) q[std::size_t{row} * dim_ + d] *= arguments.scale_log2e;
    }
    const auto block_tokens = static_cast<std::uint64_t>(arguments.block_tokens);
    const auto first = static_cast<std::uint64_t>(task.first_token);
    const std::uint64_t end = first + static_cast<std::uint64_t>(task.tokens);
    const std::uint64_t blocks = (end - 1) / block_tokens + 1;
    std::vector<const std::byte*> k(blocks);
    std::vector<const std::byte*> v(blocks);
    const std::size_t head_at = head * static_cast<std::size_t>(arguments.head_stride) * size;
    const std::size_t token_stride = static_cast<std::size_t>(arguments.token_stride) * size;
    for (std::uint64_t token = first; token < end; ++token) {
      const std::uint64_t block = token / block_tokens;
      const std::size_t offset = head_at + token % block_tokens * token_stride;
      for (auto& [host, table, base] :
           {Side{k, arguments.k_blocks, arguments.k}, {v, arguments.v_blocks, arguments.v}}) {
        const auto* entry = reached<std::int64_t>(
            launch, table + (static_cast<std::uint64_t>(task.first_block) + block) * sizeof(std::int64_t), 1);
        if (entry == nullptr || *entry < 0) return false;
        const auto* row =
            reached<std::byte>(launch, base + static_cast<std::uint64_t>(*entry) * kBlockUnit + offset, dim_ * size);
        if (row == nullptr) return false;
        host[block] = row - offset;
      }
    }
    std::vector<float> acc(q.size());
    std::vector<float> max(rows);
    std::vector<float> sum(rows);
    // Positions far up, so that none is negative; tiles begin where they do in the sequence.
    const std::uint64_t begin = (std::uint64_t{1} << 40) + static_cast<std::uint64_t>(task.skip);
    LeafJob job{};
    job.k_blocks = k.data();
    job.v_blocks = v.data();
    job.table_begin = begin - first;
    job.begin = begin;
    job.end = begin + static_cast<std::uint64_t>(task.tokens);
    job.readable = job.end;
    job.head_stride = static_cast<std::uint64_t>(arguments.head_stride) * size;
    job.token_stride = token_stride;
    job.block_tokens = static_cast<std::uint32_t>(arguments.block_tokens);
    job.head_dim = dim_;
    job.head_begin = head;
    job.head_end = head + 1;
    job.rows = rows;
    job.query_tokens = tokens;
    job.visible = job.table_begin + static_cast<std::uint64_t>(task.seen);
    job.q = q.data();
    job.scale_log2e = arguments.scale_log2e;
    job.acc = acc.data();
    job.max = max.data();
    job.sum = sum.data();
    attention_kernels().back()->leaf[kv_type_index(dtype_)](job);
    return store(launch, arguments, task, head, first_row, acc, max, sum);
  }

  struct Side {
    std::vector<const std::byte*>& host;
    CuPointer table;
    CuPointer base;
  };

  bool store(const fake_cuda::FakeLaunch& launch, const LeafArguments& arguments, const LeafTask& task, unsigned head,
             std::uint32_t first_row, const std::vector<float>& acc, const std::vector<float>& max,
             const std::vector<float>& sum) const {
    const PartialShape shape{static_cast<std::uint32_t>(task.query_tokens),
                             static_cast<std::uint32_t>(arguments.query_heads), dim_};
    auto* node = reached<float>(launch, arguments.out + static_cast<std::uint64_t>(task.out_at) * sizeof(float),
                                PartialNode::floats(shape));
    if (node == nullptr) return false;
    const std::size_t all = head * max.size();
    const std::size_t last = std::min<std::size_t>(first_row + kLeafRows, max.size());
    for (std::size_t row = first_row; row < last; ++row) {
      std::copy_n(&acc[row * dim_], dim_, node + (all + row) * dim_);
      node[shape.values() + all + row] = max[row];
      node[shape.values() + shape.rows() + all + row] = sum[row];
    }
    return true;
  }

  const DType dtype_;
  const std::uint32_t dim_;
};

// merge_pairs.
class MergesByCpu {
 public:
  explicit MergesByCpu(std::uint32_t head_dim) : dim_(head_dim) {}

  int operator()(const fake_cuda::FakeLaunch& launch) const {
    const auto arguments = arguments_of<MergeArguments>(launch);
    const auto* pairs = reached<MergePair>(launch, arguments.pairs, launch.grid[0]);
    if (pairs == nullptr) return kIllegalAddress;
    for (unsigned i = launch.grid[0]; i-- > 0;) {  // in any order
      const auto rows = static_cast<std::size_t>(pairs[i].rows);
      float* const left = node(launch, arguments, pairs[i].left_at, rows);
      const float* const right = node(launch, arguments, pairs[i].right_at, rows);
      if (left == nullptr || right == nullptr) return kIllegalAddress;
      for (std::size_t row = 0; row < rows && row < std::size_t{launch.grid[1]} * kMergeRows; ++row) {
        merge_rows({left + row * dim_, left + rows * dim_ + row, left + rows * (dim_ + 1) + row},
                   {right + row * dim_, right + rows * dim_ + row, right + rows * (dim_ + 1) + row}, 1, dim_);
      }
    }
    return 0;
  }

 private:
  float* node(const fake_cuda::FakeLaunch& launch, const MergeArguments& arguments, std::int64_t at,
              std::size_t rows) const {
    return reached<float>(launch, arguments.values + static_cast<std::uint64_t>(at) * sizeof(float), rows * (dim_ + 2));
  }

  const std::uint32_t dim_;
};

// Code for the fake driver: of one type and dimension, for one target.
struct FakeCubins {
  std::string leaves;
  std::string merges;
  std::vector<AttentionCubin> table;

  FakeCubins(std::uint32_t target, DType dtype, std::uint32_t head_dim, std::uint32_t shared_bytes = 40000)
      : leaves("fake-cubin target " + std::to_string(target) +
               " kernel attend_leaves threads 128 8a 8a 8a 8a 8a 8a 8a 8a 8a 4 4 4 4 8 8"),
        merges("fake-cubin target " + std::to_string(target) + " kernel merge_pairs threads 128 8a 8 8 8") {
    table.push_back({"leaves", "attend_leaves", code(leaves), leaves.size(), target, dtype, head_dim, kLeafRows, 64,
                     128, shared_bytes});
    table.push_back(
        {"merges", "merge_pairs", code(merges), merges.size(), target, DType::kNone, head_dim, kMergeRows, 0, 128, 0});
  }
  FakeCubins(const FakeCubins&) = delete;
  FakeCubins& operator=(const FakeCubins&) = delete;

  static const unsigned char* code(const std::string& text) {
    return reinterpret_cast<const unsigned char*>(text.c_str());
  }
};

// GPU 0 with these kernels.
class AttendingGpu {
 public:
  explicit AttendingGpu(DType dtype = DType::kFloat16, std::uint32_t head_dim = 64) : cubins_(90, dtype, head_dim) {
    say(LeavesByCpu(dtype, head_dim), MergesByCpu(head_dim));
    context_ = CudaContext::retain(0, "a test");
    gpu_ = GpuAttention::load(context_, dtype, head_dim, cubins_.table);
    REQUIRE(gpu_ != nullptr);
  }
  ~AttendingGpu() {
    gpu_.reset();
    context_.reset();
    CHECK(cuda_.left() == "");
  }
  AttendingGpu(const AttendingGpu&) = delete;
  AttendingGpu& operator=(const AttendingGpu&) = delete;

  void say(const fake_cuda::KernelBody& leaves, const fake_cuda::KernelBody& merges) const {
    cuda_.find<fake_cuda::KernelFunction>("fake_cuda_kernel")("attend_leaves", leaves);
    cuda_.find<fake_cuda::KernelFunction>("fake_cuda_kernel")("merge_pairs", merges);
  }
  const FakeCuda& fake() const { return cuda_; }
  GpuAttention& gpu() const { return *gpu_; }
  const std::shared_ptr<const CudaContext>& context() const { return context_; }

 private:
  const FakeCuda cuda_;
  const FakeCubins cubins_;
  std::shared_ptr<const CudaContext> context_;
  std::unique_ptr<GpuAttention> gpu_;
};

// The blocks of a sequence, and copies of them in the memory of the GPU, `shift` bytes behind what the driver gave.
class BlocksOnGpu {
 public:
  BlocksOnGpu(const AttendingGpu& gpu, const AttendItem& item, std::size_t block_bytes, std::size_t shift = 0)
      : gpu_(gpu), item_(item) {
    const CurrentContext current(*gpu.context(), "a test");
    const std::size_t count = item.k_blocks.size();
    const std::size_t bytes = 2 * count * block_bytes + shift;
    REQUIRE(gpu.context()->driver().mem_alloc(&memory_, std::max<std::size_t>(bytes, 1)) == 0);
    CuPointer at = memory_ + shift;
    for (std::size_t i = 0; i < count; ++i) {
      k_.push_back(copied(item.k_blocks[i], at, block_bytes));
      const bool same = item.v_blocks[i] == item.k_blocks[i];
      v_.push_back(same ? k_.back() : copied(item.v_blocks[i], at, block_bytes));
    }
    item_.k_blocks = k_;
    item_.v_blocks = v_;
  }
  ~BlocksOnGpu() {
    const CurrentContext current(*gpu_.context());
    gpu_.context()->driver().mem_free(memory_);
  }
  BlocksOnGpu(const BlocksOnGpu&) = delete;
  BlocksOnGpu& operator=(const BlocksOnGpu&) = delete;

  const AttendItem& item() const { return item_; }

 private:
  const std::byte* copied(const std::byte* from, CuPointer& at, std::size_t bytes) const {
    const auto* place = reinterpret_cast<const std::byte*>(at);  // NOLINT(performance-no-int-to-ptr)
    std::memcpy(gpu_.fake().host(place, bytes), from, bytes);
    at += bytes;
    return place;
  }

  const AttendingGpu& gpu_;
  AttendItem item_;
  CuPointer memory_ = 0;
  std::vector<const std::byte*> k_;
  std::vector<const std::byte*> v_;
};

}  // namespace kvpool::testing

#endif  // KVPOOL_FAKE_CUDA
