// A question to a peer: which blocks of this prompt has it cached, or stored under these keys? The peer holds them
// until the hold ends: the other end of held_matches.h.
//
//   Y5  What a peer holds for this side is let go of once nobody here wants it: close(), the destructor, or an answer
//       that comes after either. Else the hold's own deadline ends it.
//
// Thread-safety: all of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvpool/exec/completion.h"
#include "kvpool/transfer/messages.h"
#include "kvpool/transfer/session.h"

namespace kvpool {

struct MatchRequest {
  std::string peer;
  std::string_view name_space;
  std::span<const Token> tokens;  // a block that is not whole is ignored
  std::int64_t hold_ns = 0;       // how long the peer is to hold the blocks
  std::int64_t deadline_ns = 0;   // CLOCK_MONOTONIC: of the answer
};

struct KeyMatchRequest {
  std::string peer;
  std::string_view cache;  // its name at the peer
  std::size_t key_bytes = 0;
  std::span<const std::byte> keys;  // one after another
  bool every = false;               // all that are stored, not only those before the first that is not
  std::int64_t hold_ns = 0;
  std::int64_t deadline_ns = 0;
};

class PeerMatch final : public std::enable_shared_from_this<PeerMatch> {
 public:
  // `block_tokens`: of this pool, and so of its peers. What the request names is read here, and not later. Throws
  // kArgument for what does not fit into a message.
  PeerMatch(const MatchRequest& request, std::size_t block_tokens);
  // The same for keys. Throws kArgument for more than a message holds.
  explicit PeerMatch(const KeyMatchRequest& request);
  // Closes it, and waits for nothing.
  ~PeerMatch();
  PeerMatch(const PeerMatch&) = delete;
  PeerMatch& operator=(const PeerMatch&) = delete;

  // Asks. Called at most once. Throws kPeerLost, kBusy; then nothing was asked.
  void ask(const std::shared_ptr<Session>& session);
  // It ends without having been asked.
  void fail(const Error& why) noexcept;

  // True when it has ended, with an answer or without; then rethrow_if_failed() and addresses() may be called. Reads
  // the link meanwhile. Returns false at `until_ns`.
  bool wait(std::int64_t until_ns);
  bool done() const noexcept { return completion_.done(); }
  // Throws kPeerLost, kDeadline, kBusy, kUnsupported (an older peer), kCancelled (closed before it was answered).
  void rethrow_if_failed() const;
  // Of the peer: the cached beginning of the prompt, or the blocks of the keys that are found. Empty before the answer.
  const std::vector<Address>& addresses() const noexcept { return found_; }
  // Whether the key at this position is found. REQUIRES: keys were asked for, and it has ended.
  bool has(std::size_t position) const noexcept {
    const std::size_t eight = position / 8;
    return eight < keys_found_.size() && (std::to_integer<unsigned>(keys_found_[eight]) >> position % 8 & 1U) != 0;
  }
  std::size_t pages() const noexcept { return pages_; }  // of the question: blocks of the prompt, or keys
  // Whether the hold is over: by close(), at its deadline, with the peer, or because there was no answer. True here
  // before the peer lets go.
  bool closed() const noexcept;
  // The peer may let go of the blocks. A question without an answer ends with kCancelled. Idempotent.
  void close() noexcept;
  int done_fd() { return completion_.descriptor(); }
  const std::string& peer() const noexcept { return peer_; }
  std::int64_t deadline_ns() const noexcept { return deadline_ns_; }

 private:
  void on_end(const Message* answer, const Error* error) noexcept;
  void take(const Message& answer);
  void check_found(std::span<const std::byte> found) const;
  void let_go() const noexcept;
  void finish(std::optional<Error> error) noexcept;
  std::shared_ptr<Session> session() const noexcept;

  const std::string peer_;
  const std::int64_t deadline_ns_;
  const Verb& verb_;
  const std::size_t pages_;      // of the prompt, or keys
  Bytes message_;                // until it is sent
  const std::uint32_t made_in_;  // fork generation
  Completion completion_;
  std::vector<Address> found_;  // written before completion_, as the next
  Bytes keys_found_;            // bits
  mutable std::mutex mutex_;    // guards the next; not held while a message is sent
  std::shared_ptr<Session> session_;
  std::uint64_t id_ = 0;
  std::int64_t asked_ns_ = 0;
  std::int64_t held_until_ns_ = 0;  // 0: not answered, or closed
  bool over_ = false;               // completion_ is finished, or is about to be
  bool closed_ = false;
};

}  // namespace kvpool
