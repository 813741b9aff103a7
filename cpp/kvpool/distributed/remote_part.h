// What one call asks of one peer, and the answer.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kvpool/attention/partial.h"
#include "kvpool/distributed/sequence.h"
#include "kvpool/views/view_messages.h"

namespace kvpool {

// Not thread-safe, except for `over`: the thread that sets it first ends the part, and alone writes `answer` and `lost`
// then.
struct RemotePart {
  explicit RemotePart(std::shared_ptr<Session> of) : session(std::move(of)) {}
  // Only before it is sent.
  RemotePart(RemotePart&& other) noexcept
      : session(std::move(other.session)),
        asked(std::move(other.asked)),
        positions(std::move(other.positions)),
        views(std::move(other.views)),
        snapshots(std::move(other.snapshots)),
        tokens(other.tokens) {}

  std::shared_ptr<Session> session;
  AttendBody asked;
  std::vector<std::size_t> positions;              // in the batch, of each item
  std::vector<std::shared_ptr<RemoteView>> views;  // of each item; until it is over, as the next
  std::vector<std::shared_ptr<void>> snapshots;    // so that the blocks stay in the views
  std::uint64_t tokens = 0;                        // of all items
  std::int64_t sent_ns = 0;
  std::uint64_t id = 0;  // of the call
  std::atomic<bool> over{false};
  AttendedBody answer;
  bool lost = false;  // with the peer

  // The part of item i.
  PartialAttention take(std::size_t i, std::uint32_t head_dim) {
    return {{asked.items[i].query_tokens, asked.query_heads, head_dim}, std::move(answer.items[i].nodes)};
  }
};

// Builds the calls of one batch: for each peer as few as the length of requests and answers allows. A sequence's tokens
// at a peer are cut, where they must be, at nodes of the merge tree, so no bit depends on it.
class RemoteParts {
 public:
  // `common`: what all calls have in common.
  RemoteParts(AttendBody common, std::uint32_t head_dim) : common_(std::move(common)), head_dim_(head_dim) {}

  // Adds the tokens `range` of the sequence at `position` in the batch. `q`: its query tokens. Throws kArgument when
  // the queries are too long for any call.
  void add(const std::shared_ptr<RemoteView>& view, std::size_t position, std::uint32_t query_tokens,
           std::uint64_t query_begin, std::span<const std::byte> q, const TokenRange& range);
  std::vector<RemotePart> take() && { return std::move(parts_); }

 private:
  struct Room {  // of the last call to a peer
    std::size_t request_bytes = 0;
    std::size_t answer_bytes = 0;
    std::size_t ranges = 0;
  };
  std::size_t part_for(const RemoteView& view, std::size_t request_bytes, std::size_t answer_bytes);

  AttendBody common_;
  std::uint32_t head_dim_;
  std::vector<RemotePart> parts_;
  std::vector<Room> rooms_;  // of each part
};

}  // namespace kvpool
