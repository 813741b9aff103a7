#include "kvpool/views/remote_view.h"

#include <algorithm>
#include <utility>

#include "kvpool/base/failure.h"
#include "kvpool/base/fork_guard.h"
#include "kvpool/transfer/verbs.h"
#include "kvpool/views/view_messages.h"

namespace kvpool {

RemoteView::RemoteView(std::shared_ptr<Session> session)
    : session_(std::move(session)), id_(session_->calls().next_id()), made_in_(fork_generation()) {}

void RemoteView::add(std::uint64_t first, std::span<const Address> addresses, const Waiting& waiting) {
  PeerCalls& calls = session_->calls();
  const BlockRange all{first, addresses.size()};
  {
    const std::lock_guard lock(mutex_);
    held_.push_back(all);
  }
  try {
    while (!addresses.empty()) {
      const auto some = addresses.first(std::min(addresses.size(), kAddressesMax));
      const ViewBody body{id_, first, {some.begin(), some.end()}};
      static_cast<void>(calls.call(kViewVerb, calls.next_id(), write_body(body), waiting));
      first += some.size();
      addresses = addresses.subspan(some.size());
    }
  } catch (...) {
    remove(all);  // the peer carries the two out in this order, also when the first is late
    throw;
  }
}

void RemoteView::remove(const BlockRange& blocks) noexcept {
  if (made_in_ != fork_generation()) return;  // the link is the parent's
  const auto failure = failure_of([&] {
    const std::lock_guard lock(mutex_);
    std::vector<BlockRange> left;
    for (const BlockRange& held : held_) {
      const std::uint64_t begin = std::clamp(blocks.first, held.first, held.end());
      const std::uint64_t end = std::clamp(blocks.end(), begin, held.end());
      if (begin > held.first) left.push_back({held.first, begin - held.first});
      if (end < held.end()) left.push_back({end, held.end() - end});
    }
    held_ = std::move(left);
    PeerCalls& calls = session_->calls();
    calls.post(kUnviewVerb, calls.next_id(), write_body(UnviewBody{id_, blocks}));
  });
  if (failure) session_->calls().close(*failure);  // without memory for the message: else the peer would hold them on
}

bool RemoteView::has_any(const BlockRange& blocks) const {
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(
      held_, [&](const BlockRange& held) { return held.first < blocks.end() && blocks.first < held.end(); });
}

}  // namespace kvpool
