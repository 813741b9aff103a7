// The common base of a session's transfers: a waiting caller drives the link until the end, the deadline or the
// caller's time; and transfers that begin with a call to the peer.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>

#include "kvpool/exec/completion.h"
#include "kvpool/transfer/handle.h"
#include "kvpool/transfer/session.h"

namespace kvpool {

class AwaitedTransfer : public Transfer, public PendingAnswer, public std::enable_shared_from_this<AwaitedTransfer> {
 public:
  // --- Transfer ---
  bool wait(std::int64_t until_ns) final;
  bool done() const noexcept final { return completion_.done(); }
  void rethrow_if_failed() const final;
  int done_fd() final { return completion_.descriptor(); }
  void wait_on(const std::shared_ptr<const CudaContext>& context, CuStream stream) override;

 protected:
  using Lock = std::unique_lock<std::mutex>;

  AwaitedTransfer(std::shared_ptr<Session> session, std::uint64_t id, std::int64_t deadline_ns) noexcept;

  // Starts the clock of the statistics.
  void start_clock() noexcept;
  // Expects the peer's answer and calls begin(). Throws what begin() throws, and the transfer has not begun then,
  // unless the link ended meanwhile and told it.
  template <class Begin>
  void ask(Begin&& begin);
  // Marks it as not begun; false when it has ended already.
  virtual bool withdraw() noexcept = 0;
  // How long the peer has to keep its promises for this transfer.
  std::uint64_t lifetime_ms() const noexcept;
  double elapsed_us() const noexcept;
  // The last step of a transfer, which has moved `bytes`. Called without locks.
  void finish_waiting(TransferKind kind, std::uint64_t bytes, std::optional<Error> error) noexcept;
  // The same of a transfer that another has counted.
  void finish_uncounted(std::optional<Error> error) noexcept;
  [[noreturn]] static void throw_not_streamed();

  const std::shared_ptr<Session> session_;
  const std::uint64_t id_;
  const std::int64_t deadline_ns_;
  Completion completion_;
  mutable std::mutex mutex_;
  std::int64_t started_ns_ = 0;
};

template <class Begin>
void AwaitedTransfer::ask(Begin&& begin) {
  session_->calls().expect(id_, shared_from_this());
  try {
    session_->host().tick_by(deadline_ns_);
    begin();
  } catch (...) {
    session_->calls().forget(id_);
    if (withdraw()) throw;
  }
}

}  // namespace kvpool
