// One write under way: the puts that were handed to UCX and have not completed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "kvpool/base/copy.h"
#include "kvpool/routes/route.h"
#include "kvpool/routes/ucx/ucx_context.h"
#include "kvpool/routes/ucx/ucx_worker.h"

namespace kvpool {

// A put from memory of one kind to memory of another, as a bit.
constexpr std::uint8_t ucx_kind(bool from_gpu, bool to_gpu) noexcept {
  return static_cast<std::uint8_t>(1U << ((from_gpu ? 2U : 0U) + (to_gpu ? 1U : 0U)));
}

// Made, used and destroyed in one thread, which holds the worker's lock in between, except while it waits.
//
// Invariant: when put() or finish() has thrown, or finish() has returned, UCX has no operation of this write under way.
class UcxWrite {
 public:
  // `pidfd`: the peer's, or -1. `name`: of the peer, for errors.
  UcxWrite(UcxWorker& worker, std::shared_ptr<UcxPeer> peer, const WriteRequest& request, const std::string& name,
           int pidfd);
  ~UcxWrite();
  UcxWrite(const UcxWrite&) = delete;
  UcxWrite& operator=(const UcxWrite&) = delete;

  // Hands these to UCX, waiting for room. Returns false when the write has to stop; finish() throws why.
  bool put(std::span<const CopyPiece> pieces);
  // Waits until all puts have arrived. Throws why they have not.
  WriteOutcome finish();
  // After finish() threw kUnsupported: the ucx_kind() bits that UCX cannot copy between.
  std::uint8_t kinds_unable() const noexcept { return pending_->kinds_unable; }

 private:
  enum class Stop : std::uint8_t { kNone, kCancelled, kDeadline, kLost, kUnable };

  // The operations that UCX has not completed. It outlives the write when UCX does not release it.
  struct Pending {
    struct Slot {
      Pending* pending;
      std::size_t bytes;
      std::uint8_t kind;
    };
    UcxWorker* worker;
    std::array<Slot, 128> slots;
    std::array<Slot*, 128> free;
    std::size_t free_count;
    std::size_t bytes = 0;  // of the operations under way
    std::uint64_t bytes_done = 0;
    ucs_status_t status = UCS_OK;   // the first error
    ucs_status_t unable = UCS_OK;   // of the first put that UCX could not do between its kinds of memory: see finish()
    std::uint8_t kinds_unable = 0;  // the ucx_kind() of all such puts

    void note(ucs_status_t why, const Slot& of) noexcept;
    std::size_t count() const noexcept { return slots.size() - free_count; }
  };

  static void on_done(void* request, ucs_status_t status, void* slot) noexcept;
  bool flush();
  bool start(ucs_status_ptr_t request, std::size_t bytes) noexcept;
  ucp_request_param_t params_for(std::size_t bytes, std::uint8_t kind) noexcept;
  bool has_room(std::size_t bytes) const noexcept;
  bool wait_for_room(std::size_t bytes);
  bool between_slices();
  Stop look_for_stop(std::int64_t now_ns) noexcept;
  // Waits for done(). Checks now and then whether the peer's process lives, because UCX may not notice its end for
  // long.
  template <class Done>
  bool wait(std::int64_t deadline_ns, Done&& done);
  void look_at_process() noexcept;
  bool lost() noexcept;
  void abandon() noexcept;
  void report_progress() noexcept;
  [[noreturn]] void throw_stop(Stop why);

  UcxWorker& worker_;
  const std::shared_ptr<UcxPeer> peer_;
  const WriteRequest& request_;
  const std::string& name_;
  const int pidfd_;
  const UcxGpuScope current_;  // in this thread
  UcxLock lock_;
  std::unique_ptr<Pending> pending_;
  Stop stop_ = Stop::kNone;
  bool process_gone_ = false;
  bool started_ = false;  // a put
  WriteOutcome outcome_;
  std::size_t slice_puts_ = 0;  // since other threads last got the worker
  std::size_t slice_bytes_ = 0;
  std::uint64_t told_ = 0;  // the part of bytes_done that was reported
};

}  // namespace kvpool
