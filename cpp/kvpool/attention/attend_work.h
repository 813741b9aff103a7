// A call of attend() cut into tasks, and carried out.
//
// Each item's range is cut into the maximal nodes of the merge tree, and where its tokens are shared out, these into
// subtrees. A task computes some subtrees of one item for a range of its KV heads, so no two tasks write to one row.
//
//   A9  prepare() allocates everything; run() does not allocate and does not fail.
//   A10  A subtree's rows are written by its tasks, and read by merges only after all tasks have ended.
//   A11  A worker has scratch memory for itself, and workers take tasks from one counter: `threads` of them at most.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "kvpool/attention/attend.h"
#include "kvpool/attention/merge_rows.h"

namespace kvpool {

// The factor of scores in base 2. REQUIRES: head_dim > 0.
float scale_log2e(const AttendCall& call) noexcept;

class AttendWork {
 public:
  // REQUIRES: the call was checked, and outlives this.
  AttendWork(const AttendCall& call, const AttentionKernel& kernel, const AttendTeam& team,
             const AttendSettings& settings);

  const AttendPlan& plan() const noexcept { return plan_; }

  // Allocates memory for the results and for the workers.
  void prepare();
  // Returns false if it was stopped: then the nodes hold no results. REQUIRES: prepare().
  bool run(AttendStop* stop = nullptr) noexcept;
  // The nodes of each item. REQUIRES: run().
  std::vector<std::vector<PartialNode>> take_nodes() noexcept { return std::move(nodes_); }

 private:
  struct HeadRange {
    std::uint32_t begin;
    std::uint32_t end;
  };
  struct Subtree {
    TokenRange range;
    float* values;  // the rows of the whole item, as in a PartialNode
  };
  struct Task {
    std::size_t item;
    std::size_t first;  // subtrees_[first, last)
    std::size_t last;
    HeadRange heads;
  };
  struct Merge {  // of subtrees_[first, first + count), into the first
    std::size_t item;
    std::size_t first;
    std::size_t count;
    bool by_team;
  };
  struct Worker {
    std::vector<float> q;  // of the task's heads
    std::vector<std::uint16_t> q_bfloat16;
    std::vector<float> rows;         // of right halves, one for each level
    const Task* prepared = nullptr;  // whose queries are in q
  };

  void choose_ways(const AttendSettings& settings);
  std::uint64_t subtree_tokens(std::size_t item, const TokenRange& node) const noexcept;
  void add_node(std::size_t item, const TokenRange& node);
  void add_tasks(std::size_t item, std::size_t first_subtree);
  void add_workers();
  std::vector<HeadRange> head_groups(std::uint32_t groups) const;
  std::uint32_t rows_per_head(const AttendItem& item) const noexcept;
  PartialShape shape(const AttendItem& item) const noexcept;
  RowsView rows_of(float* values, const AttendItem& item, std::uint32_t head) const noexcept;

  bool stopped() noexcept;
  template <class Step>
  void share_out(std::size_t count, Step step) noexcept;
  void carry_out(const Task& task, Worker& worker) noexcept;
  void prepare_queries(const Task& task, Worker& worker) const noexcept;
  void compute(const Task& task, const TokenRange& range, const RowsView& out, Worker& worker, float* scratch) noexcept;
  void merge(const Merge& merge, HeadRange heads) noexcept;

  const AttendCall& call_;
  const AttentionKernel& kernel_;
  CopyTeam* const team_;
  const float scale_log2e_;
  const std::uint32_t group_;  // query heads of a KV head
  AttendPlan plan_;
  std::uint32_t split_level_ = 0;  // of subtrees, where tokens are shared out

  std::vector<std::vector<TokenRange>> ranges_;  // of each item's nodes
  std::vector<std::vector<PartialNode>> nodes_;  // of each item
  std::vector<Subtree> subtrees_;
  std::vector<Task> tasks_;
  std::vector<Merge> merges_;
  std::vector<std::vector<float>> scratch_;  // of subtrees that are not a node's first
  std::vector<Worker> workers_;
  AttendStop* stop_ = nullptr;
  std::atomic<bool> stopped_{false};  // some leaf was left out
};

}  // namespace kvpool
