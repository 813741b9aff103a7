// A peer's host memory, mapped here and made reachable for a GPU: registered with the driver by a separate thread.
//
// Registering hundreds of gigabytes takes seconds. A pool should not spend them on a peer to which it never sends, and
// writes to other memory should not wait for them. So registration begins with the first write that needs it, and a
// caller without another route waits, until its deadline.
//
// Thread-safety: all of it.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "kvpool/base/error.h"
#include "kvpool/cuda/shared_memory.h"
#include "kvpool/routes/peer_memory.h"
#include "kvpool/routes/route.h"

namespace kvpool {

class RegisteredPeerMemory {
 public:
  // `peer` may be null: then there is nothing to register.
  RegisteredPeerMemory(std::shared_ptr<const CudaContext> context, std::shared_ptr<MappedPeer> peer);
  // Does not wait: memory that is being registered is unregistered when that has ended.
  ~RegisteredPeerMemory();
  RegisteredPeerMemory(const RegisteredPeerMemory&) = delete;
  RegisteredPeerMemory& operator=(const RegisteredPeerMemory&) = delete;

  // Whether a GPU can write there now. If not, begins to register it.
  bool ready(const MediaSet& media) noexcept;
  // The same, but begins nothing.
  bool is_ready(const MediaSet& media) const noexcept;
  // Waits until a GPU can write there. Throws the driver's refusal, kDeadline, kCancelled, kPeerLost (`closed`).
  void wait(const MediaSet& media, const WriteRequest& request, const char* route, const std::atomic<bool>& closed);
  // Whether the driver has refused to register this medium.
  bool refused(Medium medium) const noexcept;

 private:
  struct Shared;
  bool begin(std::size_t medium);

  const std::shared_ptr<Shared> shared_;
  std::mutex mutex_;                   // of the threads; shared_ has its own
  MediumMap<std::thread> registrars_;  // under mutex_
};

}  // namespace kvpool
