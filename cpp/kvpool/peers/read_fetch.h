// A fetch that this process carries out by itself: it reads the owner's blocks through a mapping of the owner's memory.
//
// For destinations that the owner cannot write without help, since no file contains them: what an engine has allocated.
// The owner holds the blocks as those of a view (A13), so they keep their content while they are read, also after the
// link has ended. No other process writes to the destinations, so they are settled when the fetch has ended. An owner
// that refuses the view (it has too many, or knows none) is asked to write, as for any other fetch.
//
// Thread-safety: all of it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "kvpool/routes/route.h"
#include "kvpool/transfer/awaited.h"
#include "kvpool/transfer/request.h"

namespace kvpool {

class Fetch;
class RemoteView;

class ReadFetch final : public AwaitedTransfer {
 public:
  // Reserves the destinations for `incarnation`, this pool's. `reader`: from the owner's blocks to this pool's. Throws
  // as Fetch's constructor, and has changed nothing then.
  ReadFetch(std::shared_ptr<Session> session, std::uint64_t incarnation, const FetchRequest& request,
            bool frees_on_failure, std::unique_ptr<Route> reader);
  // Asks the owner to hold its blocks; they are read when it has answered. If this throws, the destinations are the
  // caller's again.
  void start();

  const std::vector<Address>& addresses() const override { return to_; }
  TransferStats stats() const override;
  std::uint64_t bytes_done() const noexcept override;
  std::uint64_t bytes_total() const noexcept override;
  bool cancel() override;
  bool settled() const noexcept override;
  void send_layer(std::uint32_t layer, std::shared_ptr<const DeviceOrder> after) override;
  void finish() override;

  // It asks nothing by itself: the view does.
  void on_answer(Message&& message) override;
  void on_lost(const Error& why) override;
  std::int64_t on_tick(std::int64_t now_ns) override;

 private:
  enum class Phase : std::uint8_t { kAsking, kReading, kWriting, kDone };

  bool withdraw() noexcept override { return false; }
  bool leave(Phase phase, Phase to) noexcept { return phase_.compare_exchange_strong(phase, to); }
  void on_held(const Error* error) noexcept;
  void read();
  void ask_to_write() noexcept;
  void on_written(const std::optional<Error>& error) noexcept;
  std::shared_ptr<Fetch> written() const noexcept;
  void end(std::optional<Error> error) noexcept;

  const std::uint64_t incarnation_;  // this pool's
  const std::vector<Address> from_;
  const std::vector<Address> to_;
  const Priority priority_;
  const bool frees_on_failure_;
  const std::shared_ptr<Route> reader_;
  const std::shared_ptr<RemoteView> view_;
  std::atomic<Phase> phase_{Phase::kAsking};  // the thread that takes it from kAsking goes on with it
  std::atomic<bool> cancelled_{false};
  std::atomic<std::uint64_t> bytes_done_{0};
  // The next are under mutex_.
  std::shared_ptr<Fetch> written_;  // by the owner, in place of the read
  std::uint64_t calls_ = 0;
  double held_us_ = 0;
  double total_us_ = 0;
};

}  // namespace kvpool
