// A communicator of two ranks. NCCL runs in its non-blocking mode and is polled, so no call waits without end.
//
// Thread-safety: none; may move between threads. The context of its GPU is current in every call, and when it is
// destroyed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "kvpool/cuda/context.h"
#include "kvpool/routes/nccl/nccl_cost.h"
#include "kvpool/routes/nccl/nccl_library.h"

namespace kvpool {

enum class NcclWay : std::uint8_t { kSend = 0, kReceive = 1 };  // the value is that side's rank

// Throws when a wait must end: at the deadline, after a cancellation, when the peer is lost. Called often.
using NcclCheck = std::function<void()>;

// Polls `done` until it returns true: for 50 us without sleeping, then with growing pauses of at most 500 us. Throws
// what the two functions throw.
void nccl_wait(const std::function<bool()>& done, const NcclCheck& check);

class NcclCommunicator {
 public:
  // Returns when both ranks have joined. `thread_blocks_max`: how many thread blocks it may use on the GPU; 0:
  // NCCL decides. Throws what `check` throws, and NCCL's errors: see NcclLibrary::error_of. Leaves nothing behind.
  NcclCommunicator(const CudaContext& context, const NcclLibrary& library, const NcclId& id, NcclWay way,
                   int thread_blocks_max, const NcclCheck& check);
  // Aborts: its work in a stream ends soon, even if the peer does nothing.
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  struct Piece {
    CuPointer at;
    std::size_t bytes;
  };
  // Puts one group into the stream, with each piece as a message. Throws as the constructor does. Then some messages
  // may already be in the stream, and only the destructor ends them.
  void pass(std::span<const Piece> pieces, CuStream stream, const NcclCheck& check);
  // Throws when a message in the stream has failed.
  void check_alive() const;

 private:
  NcclResult state() const;
  void await_result(const char* call, const NcclCheck& check) const;
  void put_group(std::span<const Piece> pieces, CuStream stream, const NcclCheck& check) const;

  const NcclLibrary& library_;
  const NcclWay way_;
  NcclComm comm_ = nullptr;
  CommunicatorCost cost_;
  bool passed_ = false;
};

}  // namespace kvpool
