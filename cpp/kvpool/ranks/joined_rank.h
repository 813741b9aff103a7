// A rank that has joined its scheduler: the link to it, and the requests that wait for its answers.
//
// Thread-safety: all of it. Callbacks come from any thread, without a lock held.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "kvpool/base/error.h"
#include "kvpool/net/connect/peer_metadata.h"
#include "kvpool/net/link.h"

namespace kvpool {

class JoinedRank final : public LinkHandler {
 public:
  // Receives the answer, or the error because of which no answer comes; called once.
  using Answer = std::function<void(const Message* answer, const Error* why)>;

  JoinedRank(PeerMetadata metadata, std::shared_ptr<Link> link, std::function<void(const Error& why)> on_closed)
      : metadata_(std::move(metadata)), on_closed_(std::move(on_closed)), link_(std::move(link)) {}

  const PeerMetadata& metadata() const noexcept { return metadata_; }
  std::string describe() const;

  // Sends a request. Returns its id. Throws kPeerLost; then `answer` is not called.
  std::uint64_t ask(FrameKind kind, Bytes body, Answer answer);
  // Sends a message that has no answer, or whose answer goes to another request. Never throws: if the link does not
  // take the message, the link ends.
  void tell(FrameKind kind, std::uint64_t id) noexcept;
  void close(const Error& why) noexcept;

  void on_message(Message&& message) override;
  Placement on_data(std::uint64_t id, std::span<const std::byte> body, std::uint64_t payload_bytes) override;
  void on_placed(std::uint64_t /*token*/, bool /*intact*/) override {}
  void on_closed(const Error& why) override;

 private:
  std::shared_ptr<Link> link() const;

  const PeerMetadata metadata_;
  const std::function<void(const Error&)> on_closed_;
  mutable std::mutex mutex_;
  std::shared_ptr<Link> link_;  // until it has ended
  std::uint64_t last_id_ = 0;
  std::unordered_map<std::uint64_t, Answer> waiting_;
};

}  // namespace kvpool
