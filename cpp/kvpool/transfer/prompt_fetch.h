// Brings what a peer has cached of a prompt into the index here: the mirror of a transfer that inserts.
//
//   match at the peer ──▶ reserve blocks here for what is not cached here ──▶ fetch them ──▶ insert
//
// The peer holds what it has found until it has the fetch, which holds the blocks for as long as it reads them. Nothing
// here waits: so two pools that fetch from each other cannot wait for each other.
//
// Invariant
//   Y6  What was fetched becomes the index's all at once, when all of it has arrived; else it is given back as E1 says.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "kvpool/transfer/awaited.h"
#include "kvpool/transfer/fetch.h"

namespace kvpool {

class PromptFetch final : public AwaitedTransfer, public FetchTaker {
 public:
  // `id`: of the match. Throws kArgument for what does not fit into a message.
  PromptFetch(std::shared_ptr<Session> session, std::uint64_t id, PromptFetchRequest&& request);
  void start();

  const std::vector<Address>& addresses() const override { return addresses_; }
  TransferStats stats() const override;
  std::uint64_t bytes_done() const noexcept override;
  std::uint64_t bytes_total() const noexcept override;
  bool cancel() override;
  bool settled() const noexcept override;
  void wait_on(const std::shared_ptr<const CudaContext>& context, CuStream stream) override;
  void send_layer(std::uint32_t /*layer*/, std::shared_ptr<const DeviceOrder> /*after*/) override {
    throw_not_streamed();
  }
  void finish() override { throw_not_streamed(); }

  // The answer to the match.
  void on_answer(Message&& message) override;
  void on_lost(const Error& why) override;
  std::int64_t on_tick(std::int64_t now_ns) override;

  // --- FetchTaker ---
  std::optional<Error> take() noexcept override;
  void on_fetched(const std::optional<Error>& error) noexcept override;

 private:
  enum class Phase : std::uint8_t {
    kMatching,
    kReserving,  // perhaps in another thread
    kStarting,   // the fetch is being asked for
    kFetching,
    kDone,
  };

  bool withdraw() noexcept override;
  void find_room() noexcept;
  bool reserve(Room room);
  void on_reserved(Reservation&& reservation);
  void begin_fetch();
  void end_cached(Lock& lock, std::vector<Address>&& addresses);
  void release(Lock& lock) noexcept;
  void end(Lock& lock, std::optional<Error> error);
  bool fail(const Error& why, bool linked = true) noexcept;
  void let_go() const noexcept;
  std::shared_ptr<Fetch> fetch() const noexcept;

  PromptFetchRequest request_;
  const std::uint64_t fetch_id_;
  Phase phase_ = Phase::kMatching;
  bool cancelled_ = false;          // while it was starting
  CachedPrefix here_;               // from the start on
  std::vector<Address> found_;      // at the peer
  Delivery delivery_;               // from the reservation to the end of the fetch, whose destinations stand in it
  std::vector<Address> addresses_;  // written before completion_
  std::shared_ptr<Fetch> fetch_;
  std::uint64_t blocks_ = 0;
  std::uint64_t skipped_ = 0;
  double reserve_us_ = 0;
  double total_us_ = 0;
};

}  // namespace kvpool
