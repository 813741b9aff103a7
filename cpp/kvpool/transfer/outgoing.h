// A transfer from this pool to a peer: the sending half of the protocol.
//
//   kReserving   the peer was asked for blocks                 (skipped with named destinations)
//   kStreaming   waits for send_layer() or finish()            (streamed transfers only)
//   kWriting     a write is in progress, in any thread
//   kCompleting  all is written, and the peer was told
//   kCancelling  the peer was told that the transfer is cancelled
//   kDone
//
// Invariants
//   O1  The transfer holds its source blocks for reading from its construction until the last read of them has ended.
//   O2  A write in progress ends before the peer is told that the transfer is complete or cancelled.
//   O3  It ends once, at its deadline at the latest; only a write in progress may delay that, until the route notices.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "kvpool/transfer/awaited.h"
#include "kvpool/transfer/messages.h"
#include "kvpool/transfer/strategy.h"

namespace kvpool {

class Outgoing final : public AwaitedTransfer {
 public:
  // Throws what transfer() throws, and has changed nothing then.
  Outgoing(std::shared_ptr<Session> session, std::uint64_t id, TransferRequest&& request, std::shared_ptr<Route> route);
  ~Outgoing() override;
  void start();
  // As start(), but an error ends the transfer instead of being thrown.
  void start_or_fail() noexcept;
  // The peer has recalled blocks: ends soon if it writes some of them.
  void stop_recalled() noexcept;

  // --- Transfer ---
  const std::vector<Address>& addresses() const override { return addresses_; }
  TransferStats stats() const override;
  std::uint64_t bytes_done() const noexcept override { return bytes_done_.load(std::memory_order_relaxed); }
  std::uint64_t bytes_total() const noexcept override { return bytes_total_.load(std::memory_order_relaxed); }
  bool cancel() override;
  void send_layer(std::uint32_t layer, std::shared_ptr<const DeviceOrder> after) override;
  void finish() override;

  // --- PendingAnswer ---
  void on_answer(Message&& message) override;
  void on_lost(const Error& why) override;
  std::int64_t on_tick(std::int64_t now_ns) override;

 private:
  enum class Phase : std::uint8_t { kReserving, kStreaming, kWriting, kCompleting, kCancelling, kDone };

  bool withdraw() noexcept override;
  void check_request() const;
  bool is_quiet() const noexcept;
  bool is_message() const noexcept;
  void begin();
  void reserve();
  void on_reserved(Lock& lock, const ReservedBody& body);
  void plan_writes();
  void advance(Lock& lock);
  bool write(Lock& lock);
  WriteJob next_job();
  void on_written(const WriteOutcome& outcome, const Error* error);
  void complete(Lock& lock);
  CompleteBody completion() const;
  void on_late_answer(Lock& lock, const Message& message);
  void give_up(Lock& lock, const Error& why, bool wait_for_peer);
  void end(Lock& lock, std::optional<Error> error);

  TransferRequest request_;
  std::shared_ptr<Route> route_;  // null after the end, so that a handle keeps no memory of the peer mapped
  const Strategy strategy_;
  const bool one_sided_;
  const bool named_;               // the destinations are blocks that the peer has lent
  std::atomic<bool> stop_{false};  // asks the write in progress to end
  std::atomic<std::uint64_t> bytes_done_{0};
  std::atomic<std::uint64_t> bytes_total_{0};

  Phase phase_ = Phase::kReserving;
  bool reading_ = false;      // holds the sources for reading
  bool lent_ = false;         // has marked the named destinations
  bool told_ = false;         // the peer was told that it is complete, and has not answered
  bool cancel_told_ = false;  // the peer was told that it is cancelled, and has not answered
  bool abandoned_ = false;    // the peer was told that it is cancelled
  bool overdue_ = false;      // it has ended, but content for lent blocks may still be on the link
  bool broken_ = false;       // a write may go on although it has ended: see breaks_route()
  std::optional<Error> why_;  // its error, once the write in progress has ended
  std::vector<Address> addresses_;
  std::vector<Address> write_to_;  // for blocks [held_, ...) of the request
  std::size_t held_ = 0;
  // Which thread advances the state after a write: the issuing thread if the write ends during that call, otherwise the
  // thread that ends the write. So the steps of a route that writes in the caller's thread become a loop.
  enum class Turn : std::uint8_t { kGiving, kGiven, kEnded };
  std::atomic<Turn> turn_{Turn::kGiven};
  std::vector<WriteStep> steps_;                                  // the steps that may be written
  std::vector<std::shared_ptr<const DeviceOrder>> layer_orders_;  // of a streamed transfer, by step
  std::size_t next_step_ = 0;                                     // the step that is being written, or is next
  std::vector<bool> sent_layers_;
  std::size_t layers_left_ = 0;
  bool finished_ = true;  // no more steps will come
  TransferStats stats_;
  std::int64_t phase_ns_ = 0;  // when the phase began
};

}  // namespace kvpool
