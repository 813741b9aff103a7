// Reads a peer's blocks: asks the peer to write them into blocks that are reserved here.
//
// The owner pushes, because then the process that reads the blocks also holds them, and no lease between processes is
// needed. (And pushing small pieces is faster than pulling on every transport that we measured.)
//
// Invariant
//   E1  A destination becomes active again, or free, only when the owner has said that it no longer writes, or cannot
//       write; until then it is quarantined.
//   E2  Streams that wait for a fetch continue when it has ended, successfully or not, and done() is true then. If it
//       has failed, its destinations become free only after the handle is destroyed as well, because those streams may
//       still use them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kvpool/cuda/wait_word.h"
#include "kvpool/transfer/awaited.h"
#include "kvpool/transfer/held_blocks.h"
#include "kvpool/transfer/messages.h"

namespace kvpool {

// Takes over the destinations of a fetch, in place of the caller who would own them.
class FetchTaker {
 public:
  virtual ~FetchTaker() = default;
  // They have their content. Returns why they cannot be taken over: then the fetch has failed. Called under locks of
  // the session; the pool's may be taken.
  virtual std::optional<Error> take() noexcept = 0;
  // The fetch has ended. Called once, without locks.
  virtual void on_fetched(const std::optional<Error>& error) noexcept = 0;
};

class Fetch final : public AwaitedTransfer {
 public:
  // With a taker, the destinations are not the caller's but reserved for this fetch (the peer's incarnation, and the
  // mark of the id); a failure frees them. Throws what fetch() throws, and has changed nothing then.
  Fetch(std::shared_ptr<Session> session, std::uint64_t id, const FetchRequest& request, bool frees_on_failure,
        std::shared_ptr<FetchTaker> taker = nullptr);
  ~Fetch() override;
  // Called once when it has ended, without locks. Before start().
  using OnEnd = std::function<void(const std::optional<Error>& error)>;
  void when_done(OnEnd on_end) noexcept { on_end_ = std::move(on_end); }
  void start();

  const std::vector<Address>& addresses() const override { return to_; }
  TransferStats stats() const override;
  std::uint64_t bytes_done() const noexcept override { return done() && !completion_.error() ? bytes_total() : 0; }
  std::uint64_t bytes_total() const noexcept override;
  bool cancel() override;
  bool settled() const noexcept override;
  void wait_on(const std::shared_ptr<const CudaContext>& context, CuStream stream) override;
  void send_layer(std::uint32_t layer, std::shared_ptr<const DeviceOrder> after) override;
  void finish() override;

  void on_answer(Message&& message) override;
  void on_lost(const Error& why) override;
  std::int64_t on_tick(std::int64_t now_ns) override;

 private:
  enum class Phase : std::uint8_t { kAsked, kVerifying, kCancelling, kDone };

  bool withdraw() noexcept override;
  std::optional<Error> outcome() const;
  void end(Lock& lock, std::optional<Error> error, bool may_still_write);
  void verify(Lock& lock, std::uint32_t checksum);
  void compare(std::uint32_t checksum) const;
  void end_behind_verify(const Error& why) noexcept;
  void end_unasked() noexcept;
  Error cancelled() const;
  void give_back(std::optional<Error>& error, HeldBlocks* held) noexcept;
  void tell_cancelled();

  const std::vector<Address> from_;
  const std::vector<Address> to_;
  const Priority priority_;
  const std::string route_;  // asked for
  const bool checksum_;
  const bool frees_on_failure_;
  bool placed_here_ = false;           // the owner cannot write to the destinations by itself, and they are in no file
  std::shared_ptr<FetchTaker> taker_;  // until the end
  OnEnd on_end_;                       // likewise
  Phase phase_ = Phase::kAsked;
  bool expecting_ = false;
  Receiver::QuarantineRoom room_;  // for the destinations
  FetchedBody written_;            // as the owner says
  std::optional<Error> why_;       // it ends with this when the content is no longer read
  double total_us_ = 0;
  std::mutex waiting_;                // held by one wait_on() at a time; taken before mutex_
  std::shared_ptr<WaitWord> word_;    // under mutex_: from the first wait_on() to the end
  std::shared_ptr<HeldBlocks> held_;  // under mutex_: from the first wait_on() on
};

}  // namespace kvpool
