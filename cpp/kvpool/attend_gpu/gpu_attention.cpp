#include "kvpool/attend_gpu/gpu_attention.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <utility>

#include "kvpool/base/error.h"
#include "kvpool/cuda/lasting.h"

namespace kvpool {
namespace {

constexpr const char* kWhat = "attention on a GPU";
constexpr std::size_t kAlignment = 256;
constexpr std::chrono::milliseconds kStopPeriod{1};  // after which a waiting call sees that it is to stop
constexpr std::uint8_t kVersion = 1;                 // raised when a change of the kernels changes bits

std::size_t aligned(std::size_t bytes) noexcept { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

unsigned divided_up(std::uint64_t a, std::uint64_t b) noexcept { return static_cast<unsigned>((a + b - 1) / b); }

AttentionIsa isa_of(std::uint32_t target) noexcept {
  return target >= 100 ? AttentionIsa::kSm100 : target >= 90 ? AttentionIsa::kSm90 : AttentionIsa::kSm80;
}

template <class T>
void put(std::byte* to, const std::vector<T>& values) noexcept {
  if (!values.empty()) std::memcpy(to, values.data(), values.size() * sizeof(T));
}

}  // namespace

GpuAttention::GpuAttention(const std::shared_ptr<const CudaContext>& context, const AttentionCubin& leaves,
                           const AttentionCubin& merge)
    : context_(context),
      modules_(context->driver()),
      leaves_{leaves, {context, modules_, leaves.image, leaves.kernel, leaves.threads, leaves.shared_bytes}},
      merge_{merge, {context, modules_, merge.image, merge.kernel, merge.threads, merge.shared_bytes}},
      id_{isa_of(leaves.target), kVersion} {}

GpuAttention::~GpuAttention() = default;

std::unique_ptr<GpuAttention> GpuAttention::load(const std::shared_ptr<const CudaContext>& context, DType dtype,
                                                 std::uint32_t head_dim, std::span<const AttentionCubin> cubins) {
  if (cubins.empty()) return nullptr;
  const CurrentContext current(*context, kWhat);
  const auto major = static_cast<std::uint32_t>(context->attribute(kCuDeviceMajor, kWhat));
  const auto minor = static_cast<std::uint32_t>(context->attribute(kCuDeviceMinor, kWhat));
  const auto find = [&](const char* kernel, DType of) {
    return std::ranges::find_if(cubins, [&](const AttentionCubin& cubin) {
      return std::strcmp(cubin.kernel, kernel) == 0 && cubin.dtype == of && cubin.head_dim == head_dim &&
             runs_on(cubin.target, major, minor);
    });
  };
  const auto leaves = find("attend_leaves", dtype);
  const auto merge = find("merge_pairs", DType::kNone);
  if (leaves == cubins.end() || merge == cubins.end()) return nullptr;
  try {
    return std::unique_ptr<GpuAttention>(new GpuAttention(context, *leaves, *merge));
  } catch (const Error& error) {
    if (is_lasting(error)) return nullptr;
    throw;
  }
}

LeafPlan GpuAttention::plan(const AttendCall& call) const {
  static_cast<void>(explain(call));  // kArgument before kUnsupported
  if (call.kv.dtype != leaves_.cubin.dtype || call.kv.head_dim != leaves_.cubin.head_dim) {
    throw Error(ErrorCode::kUnsupported, std::string(kWhat) + ": its kernels are for " +
                                             std::to_string(leaves_.cubin.head_dim) + " elements of " +
                                             dtype_name(leaves_.cubin.dtype) + " in a head");
  }
  return plan_leaves(call, leaves_.cubin.tile);
}

GpuAttention::Places GpuAttention::places_of(const LeafPlan& plan) noexcept {
  Places places{};
  std::size_t at = 0;
  const auto take = [&at](std::size_t bytes) {
    const std::size_t begin = at;
    at += aligned(bytes);
    return begin;
  };
  std::size_t q_bytes = 0;
  for (const std::size_t bytes : plan.q_bytes) q_bytes += bytes;
  places.q = take(q_bytes);
  places.k_blocks = take(plan.k_blocks.size() * sizeof(std::int64_t));
  places.v_blocks = take(plan.v_blocks.size() * sizeof(std::int64_t));
  places.tasks = take(plan.tasks.size() * sizeof(LeafTask));
  places.pairs = take(plan.pairs.size() * sizeof(MergePair));
  places.uploaded = at;
  places.values = take(plan.floats * sizeof(float));
  places.bytes = at;
  return places;
}

void GpuAttention::upload(const AttendCall& call, const LeafPlan& plan, const Places& places, CallSlot& slot) {
  std::byte* const host = slot.host();
  std::byte* q = host + places.q;
  for (std::size_t i = 0; i < call.items.size(); ++i) {
    std::memcpy(q, call.items[i].q, plan.q_bytes[i]);
    q += plan.q_bytes[i];
  }
  put(host + places.k_blocks, plan.k_blocks);
  put(host + places.v_blocks, plan.v_blocks);
  put(host + places.tasks, plan.tasks);
  put(host + places.pairs, plan.pairs);
  slot.upload(places.uploaded);
}

void GpuAttention::launch(const LeafPlan& plan, const Places& places, const CallSlot& slot) const {
  const CuPointer at = slot.device();
  LeafArguments leaf = plan.arguments;
  leaf.q = at + places.q;
  leaf.k_blocks = at + places.k_blocks;
  leaf.v_blocks = at + places.v_blocks;
  leaf.tasks = at + places.tasks;
  leaf.out = at + places.values;
  // Behind its own arguments Triton passes two pointers that these kernels do not use (compile.py checks that).
  CuPointer unused = 0;
  void* of_leaves[] = {&leaf.q,
                       &leaf.k,
                       &leaf.v,
                       &leaf.k_blocks,
                       &leaf.v_blocks,
                       &leaf.tasks,
                       &leaf.out,
                       &leaf.head_stride,
                       &leaf.token_stride,
                       &leaf.block_tokens,
                       &leaf.group,
                       &leaf.query_heads,
                       &leaf.scale_log2e,
                       &unused,
                       &unused};
  leaves_.loaded.launch(
      {static_cast<unsigned>(plan.tasks.size()), plan.kv_heads, divided_up(plan.group_rows_max, leaves_.cubin.rows)},
      slot.stream(), of_leaves);
  MergeArguments pairs{at + places.values, at + places.pairs};
  for (const std::size_t count : plan.level_pairs) {
    void* of_merges[] = {&pairs.values, &pairs.pairs, &unused, &unused};
    merge_.loaded.launch({static_cast<unsigned>(count), divided_up(plan.rows_max, merge_.cubin.rows), 1}, slot.stream(),
                         of_merges);
    pairs.pairs += count * sizeof(MergePair);
  }
}

std::vector<PartialAttention> GpuAttention::parts_of(const AttendCall& call, const LeafPlan& plan,
                                                     const std::byte* values) const {
  std::vector<std::vector<PartialNode>> nodes(call.items.size());
  for (const LeafPlan::Node& node : plan.nodes) {
    PartialNode& made = nodes[node.item].emplace_back(PartialNode{node.range, id_, true, {}});
    made.values.resize(node.floats);
    std::memcpy(made.values.data(), values + node.at * sizeof(float), node.floats * sizeof(float));
  }
  std::vector<PartialAttention> parts;
  parts.reserve(nodes.size());
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    parts.emplace_back(PartialShape{call.items[i].query_tokens, call.query_heads, call.kv.head_dim},
                       std::move(nodes[i]));
  }
  return parts;
}

// A slot for as long as this lives.
class GpuAttention::Taken {
 public:
  Taken(GpuAttention& of, const AttendStop* stop) : of_(of), slot_(of.take_slot(stop)) {}
  ~Taken() {
    const std::lock_guard lock(of_.mutex_);
    of_.free_slots_.push_back(std::move(slot_));  // within the room: there are kSlotsMax at most
    of_.slot_freed_.notify_one();
  }
  Taken(const Taken&) = delete;
  Taken& operator=(const Taken&) = delete;

  CallSlot& operator*() const noexcept { return *slot_; }

 private:
  GpuAttention& of_;
  std::unique_ptr<CallSlot> slot_;
};

std::unique_ptr<CallSlot> GpuAttention::take_slot(const AttendStop* stop) {
  std::unique_lock lock(mutex_);
  free_slots_.reserve(kSlotsMax);
  for (;;) {
    if (lost_) throw Error(ErrorCode::kDeviceLost, std::string(kWhat) + ": the GPU was lost in an earlier call");
    if (stop != nullptr) stop->check();
    if (!free_slots_.empty()) {
      std::unique_ptr<CallSlot> slot = std::move(free_slots_.back());
      free_slots_.pop_back();
      return slot;
    }
    if (slots_ < kSlotsMax) break;
    slot_freed_.wait_for(lock, kStopPeriod);
  }
  auto slot = std::make_unique<CallSlot>(context_);  // takes microseconds
  ++slots_;
  return slot;
}

void GpuAttention::drain(CallSlot& slot) {
  try {
    slot.drain();
  } catch (const Error& error) {
    const std::lock_guard lock(mutex_);
    lost_ = lost_ || error.code() == ErrorCode::kDeviceLost;
    throw;
  }
}

std::vector<PartialAttention> GpuAttention::attend(const AttendCall& call, const LeafPlan& plan,
                                                   const std::function<void()>& meanwhile, const AttendStop* stop) {
  const Places places = places_of(plan);
  const CurrentContext current(*context_, kWhat);
  const Taken slot(*this, stop);
  const std::size_t node_bytes = plan.node_floats * sizeof(float);
  if (!plan.tasks.empty()) (*slot).make_room(places.bytes, places.uploaded + node_bytes);
  try {
    if (!plan.tasks.empty()) {
      upload(call, plan, places, *slot);
      launch(plan, places, *slot);
      (*slot).download(places.uploaded, places.values, node_bytes);
    }
    if (meanwhile) meanwhile();
  } catch (...) {
    drain(*slot);
    throw;
  }
  drain(*slot);
  return parts_of(call, plan, (*slot).host() + places.uploaded);
}

}  // namespace kvpool
