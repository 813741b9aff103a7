// Reading a peer's blocks: the peer is asked to write them into blocks that are reserved here for that.
//
// The owner pushes, because a push needs no lease on what is read: the blocks are held where they are by the one who
// reads them. (And small pieces are faster pushed than pulled on every transport that we measured.)
//
// Invariant
//   E1  A destination is active again, or free, only when the owner has said that it writes no more, or cannot write;
//       until then it is quarantined.
//   E2  Streams that wait for a fetch go on when it has ended, however that was, and done() is true then. If it has
//       failed, no destination is free before the handle is gone, either: what those streams do with it may be going
//       on.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "kvpool/cuda/wait_word.h"
#include "kvpool/transfer/awaited.h"
#include "kvpool/transfer/held_blocks.h"

namespace kvpool {

class Fetch final : public AwaitedTransfer {
 public:
  // Throws what fetch() throws; nothing has happened then.
  Fetch(std::shared_ptr<Session> session, std::uint64_t id, const FetchRequest& request, bool frees_on_failure);
  ~Fetch() override;
  void start();

  const std::vector<Address>& addresses() const override { return to_; }
  TransferStats stats() const override;
  std::uint64_t bytes_done() const noexcept override { return done() && !completion_.error() ? bytes_total() : 0; }
  std::uint64_t bytes_total() const noexcept override;
  bool cancel() override;
  void wait_on(const std::shared_ptr<const CudaContext>& context, CuStream stream) override;
  void send_layer(std::uint32_t layer, std::shared_ptr<const DeviceOrder> after) override;
  void finish() override;

  void on_answer(Message&& message) override;
  void on_lost(const Error& why) override;
  std::int64_t on_tick(std::int64_t now_ns) override;

 private:
  enum class Phase : std::uint8_t { kAsked, kCancelling, kDone };

  bool withdraw() noexcept override;
  std::optional<Error> outcome() const;
  void end(Lock& lock, std::optional<Error> error, bool may_still_write);
  void tell_cancelled();

  const std::vector<Address> from_;
  const std::vector<Address> to_;
  const Priority priority_;
  const bool frees_on_failure_;
  Phase phase_ = Phase::kAsked;
  bool expecting_ = false;
  Receiver::QuarantineRoom room_;  // for the destinations
  double total_us_ = 0;
  std::mutex waiting_;                // of one wait_on() at a time; before mutex_
  std::shared_ptr<WaitWord> word_;    // under mutex_: from the first wait_on() to the end
  std::shared_ptr<HeldBlocks> held_;  // under mutex_: from the first wait_on() on
};

}  // namespace kvpool
