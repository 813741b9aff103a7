// Attention of a batch of sequences over KV in a GPU's memory, by kernels that were compiled ahead of time
// (cuda/attention), launched through the driver.
//
// For heads of one size and one type of elements, those of a pool. A call uploads the queries and the tables of
// leaf_plan.h, launches one kernel for all leaves and one for each level of merges, and brings the nodes back, all in a
// separate stream. What it gives are parts like those of attend() in attention/attend.h: of the same nodes, merged with
// the same bits; only leaves differ, by rounding, so the parts name another kernel.
//
// Thread-safety: all of it; up to kSlotsMax calls are under way at a time, later ones wait for one to end. Any thread
// may destroy it.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "kvpool/attend_gpu/call_slot.h"
#include "kvpool/attend_gpu/cubin.h"
#include "kvpool/attend_gpu/leaf_plan.h"
#include "kvpool/attention/attend.h"
#include "kvpool/cuda/context.h"
#include "kvpool/cuda/module_driver.h"

namespace kvpool {

class GpuAttention {
 public:
  static constexpr std::size_t kSlotsMax = 8;

  // With the kernels for K and V of this type, in heads of `head_dim` elements, loaded: a later call loads nothing.
  // Null when `cubins` has none of them that this GPU can run, or the driver says for good that it cannot run them.
  // Throws kOutOfMemory, kDeviceLost, kState (a CUDA graph is being captured), and kUnsupported when the driver refuses
  // for now.
  static std::unique_ptr<GpuAttention> load(const std::shared_ptr<const CudaContext>& context, DType dtype,
                                            std::uint32_t head_dim, std::span<const AttentionCubin> cubins);
  ~GpuAttention();
  GpuAttention(const GpuAttention&) = delete;
  GpuAttention& operator=(const GpuAttention&) = delete;

  const KernelId& kernel() const noexcept { return id_; }

  // The tables of a call. Blocks are addresses of this GPU, queries are in this process's memory. Throws as
  // plan_leaves(), and kUnsupported for another type or head_dim.
  LeafPlan plan(const AttendCall& call) const;
  // The part of each item, in their order. Calls `meanwhile` when the GPU has been given its work, and waits for the
  // GPU after that, also when it throws. Throws what that throws; kOutOfMemory, kDeviceLost; kCancelled and kDeadline
  // as `stop` says before the GPU is given work. REQUIRES: the plan is of this call. The blocks have their content, and
  // nothing writes to them until this returns.
  std::vector<PartialAttention> attend(const AttendCall& call, const LeafPlan& plan,
                                       const std::function<void()>& meanwhile = {}, const AttendStop* stop = nullptr);

 private:
  struct Kernel {
    const AttentionCubin cubin;
    const LoadedKernel loaded;
  };
  // Where the parts of a call's memory begin, in bytes; each is aligned. The nodes, with which the values begin, come
  // back to the host behind what is uploaded.
  struct Places {
    std::size_t q, k_blocks, v_blocks, tasks, pairs, uploaded, values, bytes;
  };
  class Taken;

  // REQUIRES: the context is current.
  GpuAttention(const std::shared_ptr<const CudaContext>& context, const AttentionCubin& leaves,
               const AttentionCubin& merge);

  static Places places_of(const LeafPlan& plan) noexcept;
  static void upload(const AttendCall& call, const LeafPlan& plan, const Places& places, CallSlot& slot);
  void launch(const LeafPlan& plan, const Places& places, const CallSlot& slot) const;
  std::vector<PartialAttention> parts_of(const AttendCall& call, const LeafPlan& plan, const std::byte* nodes) const;
  std::unique_ptr<CallSlot> take_slot(const AttendStop* stop);
  void drain(CallSlot& slot);

  const std::shared_ptr<const CudaContext> context_;
  const ModuleDriver modules_;
  const Kernel leaves_;
  const Kernel merge_;
  const KernelId id_;
  std::mutex mutex_;  // guards all below; not held while a call is under way
  std::condition_variable slot_freed_;
  std::vector<std::unique_ptr<CallSlot>> free_slots_;
  std::size_t slots_ = 0;  // free or taken
  bool lost_ = false;
};

}  // namespace kvpool
