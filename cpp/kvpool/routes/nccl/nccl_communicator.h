// A communicator of two ranks that is never waited for without end: NCCL is told not to block, and asked.
//
// Thread-safety: none; may go from thread to thread. The context of its GPU is current in every call, and when it is
// destroyed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "kvpool/cuda/context.h"
#include "kvpool/routes/nccl/nccl_library.h"

namespace kvpool {

enum class NcclWay : std::uint8_t { kSend = 0, kReceive = 1 };  // the rank of the side that does it

// Throws when a wait is to end: the deadline, a cancellation, a peer that is lost. Called often.
using NcclCheck = std::function<void()>;

// Asks `done` until it holds: without sleeping for 50 us, then ever more rarely, every 500 us at last. Throws what they
// throw.
void nccl_wait(const std::function<bool()>& done, const NcclCheck& check);

class NcclCommunicator {
 public:
  // Returns when both ranks are there. `thread_blocks_max`: of the GPU, for all that it passes; 0 leaves it to NCCL.
  // Throws what `check` throws, and what NCCL said: see NcclLibrary::error_of. Leaves nothing behind.
  NcclCommunicator(const NcclLibrary& library, const NcclId& id, NcclWay way, int thread_blocks_max,
                   const NcclCheck& check);
  // Aborts: what it has in a stream ends soon, whatever the peer does.
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  struct Piece {
    CuPointer at;
    std::size_t bytes;
  };
  // Puts one group into the stream: each piece is one message. Throws as the constructor; then some may be in the
  // stream, and only the destructor makes them end.
  void pass(std::span<const Piece> pieces, CuStream stream, const NcclCheck& check);
  // Throws when something in the stream has failed.
  void check_alive() const;

 private:
  NcclResult state() const;
  void await_result(const char* call, const NcclCheck& check) const;

  const NcclLibrary& library_;
  const NcclWay way_;
  NcclComm comm_ = nullptr;
};

}  // namespace kvpool
