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

// Made, used and destroyed in one thread, which holds the worker's lock in between but for waiting.
//
// Invariant: when put() or finish() has thrown, or finish() has returned, UCX has nothing of this write any more.
class UcxWrite {
 public:
  // `pidfd`: the peer's, or -1. `name`: of the peer, for errors.
  UcxWrite(UcxWorker& worker, std::shared_ptr<UcxPeer> peer, const WriteRequest& request, const std::string& name,
           int pidfd);
  ~UcxWrite();
  UcxWrite(const UcxWrite&) = delete;
  UcxWrite& operator=(const UcxWrite&) = delete;

  // Hands these to UCX, waiting for room. False: no more of them, finish() says why.
  bool put(std::span<const CopyPiece> pieces);
  // Waits until everything is where it belongs. Throws why it is not.
  WriteOutcome finish();
  // When that was kUnsupported: between which kinds of memory there is no way, a bit of each.
  std::uint8_t kinds_unable() const noexcept { return pending_->kinds_unable; }

 private:
  enum class Stop : std::uint8_t { kNone, kCancelled, kDeadline, kLost, kUnable };

  // What UCX was given and has not completed. It outlives the write when UCX does not let go of it.
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
    ucs_status_t unable = UCS_OK;   // of a put, the first that says that there is no way: see finish()
    std::uint8_t kinds_unable = 0;  // of all that say so

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
  // Waits for done(), and looks now and then whether the peer's process lives, which UCX may not notice for long.
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
  WriteOutcome outcome_;
  std::size_t slice_puts_ = 0;  // since others were let at the worker
  std::size_t slice_bytes_ = 0;
  std::uint64_t told_ = 0;  // of bytes_done
};

}  // namespace kvpool
