#include "kvpool/attention/attend_work.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>

#include "kvpool/attention/merge_tree.h"
#include "kvpool/attention/number_formats.h"
#include "kvpool/base/clock.h"

namespace kvpool {
namespace {

constexpr double kLog2E = 1.44269504088896340736;
constexpr std::uint64_t kTasksPerThread = 2;     // of heads: they are alike, but threads may not be
constexpr std::uint64_t kSubtreesPerThread = 8;  // subtrees end anywhere, and cost little: more of them even out better

AttendWay way_of(std::uint64_t tokens, const AttendSettings& settings) noexcept {
  if (tokens <= settings.heads_tokens_max) return AttendWay::kHeads;
  return tokens <= settings.leaves_tokens_max ? AttendWay::kLeaves : AttendWay::kLeavesAndMerges;
}

std::uint64_t divided_up(std::uint64_t a, std::uint64_t b) noexcept { return (a + b - 1) / b; }

}  // namespace

float scale_log2e(const AttendCall& call) noexcept {
  const double scale = call.scale ? static_cast<double>(*call.scale) : 1.0 / std::sqrt(call.kv.head_dim);
  return static_cast<float>(scale * kLog2E);
}

AttendWork::AttendWork(const AttendCall& call, const AttentionKernel& kernel, const AttendTeam& team,
                       const AttendSettings& settings)
    : call_(call),
      kernel_(kernel),
      team_(team.team),
      scale_log2e_(scale_log2e(call)),
      group_(call.query_heads / call.kv.kv_heads) {
  plan_.kernel = kernel.id;
  plan_.threads = team.team == nullptr ? 1 : std::max(team.threads, 1);
  choose_ways(settings);
  for (std::size_t i = 0; i < call.items.size(); ++i) {
    ranges_.push_back(maximal_nodes(call.items[i].range));
    for (const TokenRange& node : ranges_.back()) {
      plan_.items[i].nodes += static_cast<std::uint32_t>(node.tokens() / subtree_tokens(i, node));
    }
  }
}

// How finely heads and tokens are shared out changes no bit; it only keeps every thread busy, with pieces as large as
// that allows: neighbouring heads lie side by side in memory.
void AttendWork::choose_ways(const AttendSettings& settings) {
  const auto threads = static_cast<std::uint64_t>(plan_.threads);
  const std::uint64_t heads = call_.kv.kv_heads;
  const auto has_tokens = [](const AttendItem& item) { return item.range.tokens() > 0; };
  const auto items = static_cast<std::uint64_t>(std::count_if(call_.items.begin(), call_.items.end(), has_tokens));
  std::uint64_t by_heads = 0;  // items
  std::uint64_t leaves = 0;    // of the other items
  for (const AttendItem& item : call_.items) {
    AttendWay way = way_of(item.range.tokens(), settings);
    if (way == AttendWay::kHeads && items * heads < threads && item.range.tokens() > kLeafTokens) {
      way = AttendWay::kLeaves;
    }
    plan_.items.push_back({way, 1, 0});
    if (way == AttendWay::kHeads) {
      by_heads += has_tokens(item) ? 1 : 0;
    } else {
      leaves += divided_up(item.range.tokens(), kLeafTokens);
    }
  }
  if (threads == 1) {
    split_level_ = 63;
    return;
  }
  const std::uint64_t wanted = kSubtreesPerThread * threads;
  split_level_ = leaves <= wanted ? 0 : static_cast<std::uint32_t>(std::bit_width(leaves / wanted)) - 1;
  for (AttendPlan::Item& item : plan_.items) {
    const std::uint64_t others = item.way == AttendWay::kHeads ? by_heads : leaves >> split_level_;
    const std::uint64_t groups = divided_up(kTasksPerThread * threads, std::max<std::uint64_t>(others, 1));
    item.head_groups = static_cast<std::uint32_t>(std::min(groups, heads));
  }
}

// The size of the subtrees that a node is cut into: its own, when it stays whole.
std::uint64_t AttendWork::subtree_tokens(std::size_t item, const TokenRange& node) const noexcept {
  const bool whole =
      plan_.items[item].way == AttendWay::kHeads || !is_tree_node(node) || tree_level(node) <= split_level_;
  return whole ? node.tokens() : kLeafTokens << split_level_;
}

std::vector<AttendWork::HeadRange> AttendWork::head_groups(std::uint32_t groups) const {
  std::vector<HeadRange> ranges;
  ranges.reserve(groups);
  const std::uint32_t heads = call_.kv.kv_heads;
  for (std::uint32_t i = 0; i < groups; ++i) ranges.push_back({heads * i / groups, heads * (i + 1) / groups});
  return ranges;
}

std::uint32_t AttendWork::rows_per_head(const AttendItem& item) const noexcept { return group_ * item.query_tokens; }

PartialShape AttendWork::shape(const AttendItem& item) const noexcept {
  return {item.query_tokens, call_.query_heads, call_.kv.head_dim};
}

// Rows of KV head `head` and those behind it.
RowsView AttendWork::rows_of(float* values, const AttendItem& item, std::uint32_t head) const noexcept {
  const PartialShape all = shape(item);
  const std::size_t row = std::size_t{head} * rows_per_head(item);
  return {values + row * all.head_dim, values + all.values() + row, values + all.values() + all.rows() + row};
}

void AttendWork::prepare() {
  nodes_.resize(call_.items.size());
  for (std::size_t item = 0; item < call_.items.size(); ++item) {
    const std::size_t first_subtree = subtrees_.size();
    for (const TokenRange& node : ranges_[item]) add_node(item, node);
    add_tasks(item, first_subtree);
  }
  add_workers();
}

void AttendWork::add_node(std::size_t item, const TokenRange& node) {
  const std::size_t floats = PartialNode::floats(shape(call_.items[item]));
  nodes_[item].push_back({node, kernel_.id, true, std::vector<float>(floats)});
  const std::uint64_t tokens = subtree_tokens(item, node);
  if (node.tokens() > tokens) {
    const bool by_team = plan_.items[item].way == AttendWay::kLeavesAndMerges;
    merges_.push_back({item, subtrees_.size(), node.tokens() / tokens, by_team});
  }
  for (std::uint64_t begin = node.begin; begin < node.end; begin += tokens) {
    std::vector<float>& values =
        begin == node.begin ? nodes_[item].back().values : scratch_.emplace_back(std::vector<float>(floats));
    subtrees_.push_back({{begin, begin + tokens}, values.data()});
  }
}

// Of one head group all subtrees, then of the next: queries are prepared once for each group.
void AttendWork::add_tasks(std::size_t item, std::size_t first_subtree) {
  if (subtrees_.size() == first_subtree) return;
  const AttendPlan::Item& plan = plan_.items[item];
  for (const HeadRange& heads : head_groups(plan.head_groups)) {
    if (plan.way == AttendWay::kHeads) {
      tasks_.push_back({item, first_subtree, subtrees_.size(), heads});
      continue;
    }
    for (std::size_t i = first_subtree; i < subtrees_.size(); ++i) tasks_.push_back({item, i, i + 1, heads});
  }
}

void AttendWork::add_workers() {
  std::size_t rows = 0;  // the most of any task
  for (const Task& task : tasks_) {
    rows = std::max(rows, std::size_t{task.heads.end - task.heads.begin} * rows_per_head(call_.items[task.item]));
  }
  std::size_t levels = 0;
  for (const Subtree& subtree : subtrees_) {
    if (is_tree_node(subtree.range)) levels = std::max<std::size_t>(levels, tree_level(subtree.range));
  }
  workers_.resize(std::min(static_cast<std::size_t>(plan_.threads), tasks_.size()));
  for (Worker& worker : workers_) {
    worker.q.resize(rows * call_.kv.head_dim);
    if (call_.query_dtype == DType::kBfloat16) worker.q_bfloat16.resize(worker.q.size());
    worker.rows.resize(levels * rows * (std::size_t{call_.kv.head_dim} + 2));
  }
}

// Calls step(worker, i) for each i below count, by at most as many threads as there are workers.
template <class Step>
void AttendWork::share_out(std::size_t count, Step step) noexcept {
  struct Shared {
    std::atomic<std::size_t> next{0};
    std::size_t count;
    Step& step;
  };
  Shared shared{{}, count, step};
  const auto part = [](void* context, std::size_t worker) noexcept {
    Shared& all = *static_cast<Shared*>(context);
    for (;;) {
      const std::size_t i = all.next.fetch_add(1, std::memory_order_relaxed);
      if (i >= all.count) return;
      all.step(worker, i);
    }
  };
  const std::size_t parts = std::min(workers_.size(), count);
  if (parts > 1) {
    team_->run_parts(parts, part, &shared);
  } else {
    part(&shared, 0);
  }
}

// A leaf takes some microseconds, the clock a fraction of one.
bool AttendWork::stopped() noexcept {
  if (stop_ == nullptr) return false;
  if (stopped_.load(std::memory_order_relaxed)) return true;
  if (!stop_->is_asked() && monotonic_ns() < stop_->until_ns) return false;
  stopped_.store(true, std::memory_order_relaxed);
  return true;
}

bool AttendWork::run(AttendStop* stop) noexcept {
  stop_ = stop;
  share_out(tasks_.size(), [this](std::size_t worker, std::size_t i) { carry_out(tasks_[i], workers_[worker]); });
  const HeadRange all{0, call_.kv.kv_heads};
  std::size_t by_team = 0;
  for (const Merge& one : merges_) {
    if (one.by_team) {
      ++by_team;
    } else {
      merge(one, all);
    }
  }
  // Merges are few and long: each is shared out head by head.
  const std::size_t heads = call_.kv.kv_heads;
  if (by_team > 0) {
    share_out(merges_.size() * heads, [this, heads](std::size_t, std::size_t i) {
      const Merge& one = merges_[i / heads];
      const auto head = static_cast<std::uint32_t>(i % heads);
      if (one.by_team) merge(one, {head, head + 1});
    });
  }
  return !stopped_.load(std::memory_order_relaxed);
}

void AttendWork::carry_out(const Task& task, Worker& worker) noexcept {
  prepare_queries(task, worker);
  const AttendItem& item = call_.items[task.item];
  for (std::size_t i = task.first; i < task.last; ++i) {
    compute(task, subtrees_[i].range, rows_of(subtrees_[i].values, item, task.heads.begin), worker, worker.rows.data());
  }
}

// Query tokens come first in the caller's memory, heads in rows.
void AttendWork::prepare_queries(const Task& task, Worker& worker) const noexcept {
  const Task* before = worker.prepared;
  worker.prepared = &task;
  if (before != nullptr && before->item == task.item && before->heads.begin == task.heads.begin) return;
  const AttendItem& item = call_.items[task.item];
  const std::size_t dim = call_.kv.head_dim;
  const std::size_t bytes = dim * dtype_bytes(call_.query_dtype);
  std::size_t row = 0;
  for (std::size_t head = task.heads.begin * group_; head < task.heads.end * group_; ++head) {
    for (std::size_t token = 0; token < item.query_tokens; ++token, ++row) {
      const std::byte* from = item.q + (token * call_.query_heads + head) * bytes;
      float* to = &worker.q[row * dim];
      to_floats(call_.query_dtype, from, dim, to);
      for (std::size_t d = 0; d < dim; ++d) to[d] *= scale_log2e_;
      if (!worker.q_bfloat16.empty()) std::memcpy(&worker.q_bfloat16[row * dim], from, bytes);
    }
  }
}

// The rows of a node, a leaf or a part of a leaf. `scratch` has room for the right halves below.
void AttendWork::compute(const Task& task, const TokenRange& range, const RowsView& out, Worker& worker,
                         float* scratch) noexcept {
  const AttendItem& item = call_.items[task.item];
  const std::size_t rows = std::size_t{task.heads.end - task.heads.begin} * rows_per_head(item);
  const std::size_t dim = call_.kv.head_dim;
  if (range.tokens() > kLeafTokens) {
    const std::uint64_t middle = range.begin + range.tokens() / 2;
    const RowsView right{scratch, scratch + rows * dim, scratch + rows * dim + rows};
    float* below = scratch + rows * (dim + 2);
    compute(task, {range.begin, middle}, out, worker, below);
    compute(task, {middle, range.end}, right, worker, below);
    merge_rows(out, {right.acc, right.max, right.sum}, rows, dim);
    return;
  }
  if (stopped()) return;
  const KVRows& kv = call_.kv;
  LeafJob job{};
  job.k_blocks = item.k_blocks.data();
  job.v_blocks = item.v_blocks.data();
  job.table_begin = item.table_begin;
  job.begin = range.begin;
  job.end = range.end;
  job.readable = subtrees_[task.last - 1].range.end;
  job.k_offset = kv.k_offset;
  job.v_offset = kv.v_offset;
  job.head_stride = kv.head_stride;
  job.token_stride = kv.token_stride;
  job.block_tokens = kv.block_tokens;
  job.head_dim = kv.head_dim;
  job.head_begin = task.heads.begin;
  job.head_end = task.heads.end;
  job.rows = rows_per_head(item);
  job.query_tokens = item.query_tokens;
  job.visible = call_.causal ? item.query_begin + 1 : kSequenceTokensMax;
  job.q = worker.q.data();
  job.q_bfloat16 = worker.q_bfloat16.empty() ? nullptr : worker.q_bfloat16.data();
  job.scale_log2e = scale_log2e_;
  job.acc = out.acc;
  job.max = out.max;
  job.sum = out.sum;
  kernel_.leaf[kv_type_index(kv.dtype)](job);
}

void AttendWork::merge(const Merge& merge, HeadRange heads) noexcept {
  const AttendItem& item = call_.items[merge.item];
  const std::size_t rows = std::size_t{heads.end - heads.begin} * rows_per_head(item);
  for (std::size_t apart = 1; apart < merge.count; apart *= 2) {
    for (std::size_t i = 0; i < merge.count; i += 2 * apart) {
      const RowsView left = rows_of(subtrees_[merge.first + i].values, item, heads.begin);
      const RowsView right = rows_of(subtrees_[merge.first + i + apart].values, item, heads.begin);
      merge_rows(left, {right.acc, right.max, right.sum}, rows, call_.kv.head_dim);
    }
  }
}

}  // namespace kvpool
