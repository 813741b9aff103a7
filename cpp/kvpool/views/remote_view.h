// A view that this pool has of one sequence's blocks at one peer: the other end of peer_views.h. Where the peer's
// memory is mapped here, the blocks can also be read from here; the peer holds them until it hears that this is over.
//
// Thread-safety: all of it; of two add() at the same time the blocks must not overlap.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "kvpool/base/address.h"
#include "kvpool/base/segment.h"
#include "kvpool/base/wait.h"
#include "kvpool/sequences/block_runs.h"
#include "kvpool/sequences/readable_blocks.h"
#include "kvpool/sequences/readings.h"
#include "kvpool/transfer/loan_watch.h"
#include "kvpool/transfer/session.h"

namespace kvpool {

class RemoteView final : public LoanWatch, public std::enable_shared_from_this<RemoteView> {
 public:
  static std::shared_ptr<RemoteView> open(std::shared_ptr<Session> session);
  explicit RemoteView(std::shared_ptr<Session> session);  // use open()
  // Closes it, and waits for nothing.
  ~RemoteView() override;
  RemoteView(const RemoteView&) = delete;
  RemoteView& operator=(const RemoteView&) = delete;

  // Returns when the peer holds the blocks. If it throws, the peer holds none of them, or soon will not: kPeerLost,
  // kDeadline, kCancelled, kBusy, and what holding them throws there.
  void add(std::uint64_t first, std::span<const Address> addresses, const Waiting& waiting);
  // The same without waiting, for one message's blocks: `done` is called once, with the error if there is one, by the
  // thread that brings the answer. If it throws, `done` was not called or will not be.
  void begin_add(std::uint64_t first, std::span<const Address> addresses, std::int64_t until_ns,
                 std::function<void(const Error* error)> done);
  // Without waiting; the peer is told when readings that began before have ended.
  void remove(const BlockRange& blocks) noexcept;
  // Whether the peer holds one of these blocks, or will when an add() that is under way succeeds.
  bool has_any(const BlockRange& blocks) const;

  // Which of these blocks are not in the view: removed, or recalled by the peer.
  std::vector<BlockRange> missing(const BlockRange& blocks) const;
  // Whether the peer's memory is mapped here.
  bool is_mapped() const noexcept { return spans_ != nullptr; }
  // Whether read() may be called for these blocks: the peer's memory is mapped here, and has them.
  bool is_readable(const BlockRange& blocks) const;
  // The blocks, as they are now. REQUIRES: is_readable() of those that are read. Throws kPeerLost.
  ReadableBlocks read();

  std::uint64_t id() const noexcept { return id_; }
  Session& session() const noexcept { return *session_; }
  const std::shared_ptr<Session>& session_pointer() const noexcept { return session_; }

  void on_loans_ended(const AddressSet& addresses) noexcept override;

 private:
  static constexpr BlockRange kEverything{0, UINT64_MAX};
  struct Removed {
    std::uint64_t number;
    std::uint64_t before;  // readings with lower numbers may read them
    BlockRange blocks;
    bool being_told = false;
  };
  struct Reading;
  void note(std::uint64_t first, std::span<const Address> addresses);
  void take_out(const BlockRange& blocks);
  void tell_removed() noexcept;
  void give_up(const Error& why) noexcept;
  void end_reading(std::uint64_t number) noexcept;

  const std::shared_ptr<Session> session_;
  const std::shared_ptr<const MediaSpans> spans_;  // the peer's memory; null: not mapped
  const std::uint64_t id_;
  const std::uint32_t made_in_;  // fork generation
  mutable std::mutex mutex_;     // guards the next; not held while a message is sent
  std::shared_ptr<const BlockRuns> runs_ = std::make_shared<BlockRuns>();  // never changed: readings share it
  std::vector<Removed> removed_;                                           // until the peer has been told
  std::uint64_t removals_ = 0;
  bool all_mapped_ = true;  // the mapping has every block that was ever in the view: looked at once, not in each call
  Readings readings_;
};

}  // namespace kvpool
