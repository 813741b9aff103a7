// What the process that joined holds: the rank, which belongs to it and to no child that it forks.
#include "kvpool/ranks/rank_node.h"

#include <utility>

#include "kvpool/base/fork_guard.h"
#include "kvpool/ranks/serving_rank.h"

namespace kvpool {
namespace {

// In a forked child the node is left as it is: its threads are not there, and its locks may be held for ever.
class OwnNode final : public RankNode {
 public:
  explicit OwnNode(std::unique_ptr<ServingRank> node) : node_(std::move(node)) {}
  ~OwnNode() override {
    if (forked()) static_cast<void>(node_.release());
  }

  std::string address() const override {
    if (forked()) throw not_here();
    return node_->address();
  }
  std::optional<Error> lost() const override { return forked() ? not_here() : node_->lost(); }
  bool wait_lost(std::int64_t deadline_ns) override {
    if (forked()) throw not_here();
    return node_->wait_lost(deadline_ns);
  }
  void close() noexcept override {
    if (!forked()) node_->close();
  }

 private:
  bool forked() const noexcept { return fork_generation() != born_; }
  static Error not_here() { return {ErrorCode::kFork, "this rank belongs to the parent process"}; }

  std::unique_ptr<ServingRank> node_;
  const std::uint32_t born_ = fork_generation();
};

}  // namespace

std::unique_ptr<RankNode> RankNode::join(const RankOptions& options, LocalMemory memory, const Waiting& waiting) {
  auto node = std::make_unique<ServingRank>(options, std::move(memory));
  node->join(waiting);
  return std::make_unique<OwnNode>(std::move(node));
}

}  // namespace kvpool
