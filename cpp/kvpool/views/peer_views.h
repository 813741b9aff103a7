// The blocks of this pool that one peer views, and the attention that it asks for over them.
//
//   A13  A view belongs to one incarnation of one peer, and ends with the link. A block in it is held for reading, as
//        A12 says, until the peer removes it, its recall ends, or the link does. Where the peer may be reading through
//        a mapping of this pool's memory, only its word, or the proof that it is gone, ends the last two.
//
// Thread-safety: all of it. Lives on while a call is served.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>

#include "kvpool/sequences/sequence_blocks.h"
#include "kvpool/transfer/peer_calls.h"
#include "kvpool/transfer/peer_reads.h"
#include "kvpool/transfer/request_bytes.h"
#include "kvpool/views/view_messages.h"

namespace kvpool {

class LentAttends;
class Pool;

struct ViewLimits {
  std::size_t views_max = 65536;                           // of one peer
  std::size_t blocks_max = std::size_t{1} << 22;           // of one peer, in all its views
  std::size_t request_bytes_max = std::size_t{256} << 20;  // of its attends that have not been answered
};

class PeerViews final : public PeerReads, public std::enable_shared_from_this<PeerViews> {
 public:
  // The pool and `attends` outlive the calls of the peer.
  // `by_mapping`: the peer may have this pool's memory mapped.
  PeerViews(Pool& pool, LentAttends& attends, std::uint64_t incarnation, bool by_mapping, const ViewLimits& limits = {})
      : pool_(pool), attends_(attends), incarnation_(incarnation), by_mapping_(by_mapping), limits_(limits) {}

  void serve(PeerCalls& calls) override;
  std::size_t on_recalled(std::span<const Address> addresses) noexcept override;
  bool has_any() const noexcept override;
  void on_lost() noexcept override;
  void on_reader_gone() noexcept override;
  bool awaits_proof() const noexcept override;

 private:
  struct View {
    std::shared_ptr<SequenceBlocks> blocks;
    bool by_mapping = false;
  };
  using Views = std::unordered_map<std::uint64_t, View>;
  void on_view(const ViewBody& body, const CallPointer& call);
  void await_content(const ViewBody& body, bool by_mapping, const CallPointer& call) const;
  void take_out(std::uint64_t view, SequenceBlocks& blocks, const BlockRange& range) noexcept;
  void on_unview(const UnviewBody& body);
  void on_attend(const CallPointer& call, AttendBody&& body);
  std::shared_ptr<SequenceBlocks> find(std::uint64_t view) const;
  void check_bytes(const AttendBody& body) const;

  Pool& pool_;
  LentAttends& attends_;
  const std::uint64_t incarnation_;
  const bool by_mapping_;
  const ViewLimits limits_;
  const std::shared_ptr<RequestBytes> request_bytes_ = std::make_shared<RequestBytes>();

  mutable std::mutex mutex_;  // taken before those of the views
  Views views_;
  std::size_t blocks_ = 0;  // that were added, and have not been removed by the peer
  bool lost_ = false;
};

}  // namespace kvpool
