#include "kvpool/distributed/remote_part.h"

#include <string>
#include <utility>

#include "kvpool/attention/merge_tree.h"
#include "kvpool/base/error.h"
#include "kvpool/transfer/verbs.h"

namespace kvpool {
namespace {

constexpr std::size_t kHeaderBytes = 64;  // of a request
constexpr std::size_t kItemBytes = 64;    // with its first range

}  // namespace

void RemoteParts::add(const std::shared_ptr<RemoteView>& view, std::size_t position, std::uint32_t query_tokens,
                      std::uint64_t query_begin, std::span<const std::byte> q, const TokenRange& range) {
  const PartialShape shape{query_tokens, common_.query_heads, head_dim_};
  for (const TokenRange& node : maximal_nodes(range)) {
    const std::size_t answer_bytes = attended_bytes({&node, 1}, shape);
    const std::size_t request_bytes = kItemBytes + q.size();
    const std::size_t at = part_for(*view, request_bytes, answer_bytes);
    RemotePart& part = parts_[at];
    Room& room = rooms_[at];
    room.answer_bytes += answer_bytes;
    part.tokens += node.tokens();
    std::vector<AttendBody::Item>& items = part.asked.items;
    if (items.empty() || items.back().view != view->id() || part.positions.back() != position) {
      items.push_back({view->id(), query_tokens, query_begin, {}});
      part.positions.push_back(position);
      part.views.push_back(view);
      part.asked.q.insert(part.asked.q.end(), q.begin(), q.end());
      room.request_bytes += request_bytes;
    }
    std::vector<TokenRange>& ranges = items.back().ranges;
    if (!ranges.empty() && ranges.back().end == node.begin) {
      ranges.back().end = node.end;
    } else {
      ranges.push_back(node);
      ++room.ranges;
      room.request_bytes += sizeof(TokenRange);
    }
  }
}

// The call that takes so much more.
std::size_t RemoteParts::part_for(const RemoteView& view, std::size_t request_bytes, std::size_t answer_bytes) {
  if (kHeaderBytes + request_bytes > kAttendVerb.request_bytes_max ||
      kAttendedHeaderBytes + answer_bytes > kAttendVerb.answer_bytes_max) {
    throw Error(ErrorCode::kArgument, "the queries of one sequence have " + std::to_string(request_bytes) +
                                          " bytes, which is too long for a call to a peer");
  }
  for (std::size_t i = parts_.size(); i-- > 0;) {
    if (parts_[i].session != view.session_pointer()) continue;
    const bool fits = rooms_[i].request_bytes + request_bytes <= kAttendVerb.request_bytes_max &&
                      rooms_[i].ranges < kAttendRangesMax && parts_[i].asked.items.size() < kAttendItemsMax &&
                      rooms_[i].answer_bytes + answer_bytes <= kAttendVerb.answer_bytes_max;
    if (fits) return i;
    break;
  }
  RemotePart& part = parts_.emplace_back(view.session_pointer());
  part.asked = common_;
  rooms_.push_back({kHeaderBytes, kAttendedHeaderBytes, 0});
  return parts_.size() - 1;
}

}  // namespace kvpool
