// Memory of pools that were closed while a peer could still write into it by its address: a process that was stopped in
// a write, one whose GPU has it open, an adapter that UCX has not let go of. It belongs to nobody any more, and stays
// what it is until it is proved that nothing of that peer writes; then it is given back.
//
// Thread-safety: all of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "kvpool/net/descriptor.h"

namespace kvpool {

// What may still write. Both proofs are needed, where there are both.
struct LateWriter {
  Descriptor process;           // its pidfd: readable when the process has ended; none: nothing to wait for
  std::function<bool()> fence;  // ends what is under way here; true when it has. Empty: nothing to end
  std::int64_t grace_ns = 0;    // how long after its end something may be under way that the process had begun
};

class RetainedMemory {
 public:
  // A separate thread keeps the memory, and ends with it. If no thread can be started, the memory is kept for ever.
  static void keep(std::shared_ptr<void> memory, std::vector<LateWriter> writers) noexcept;
  // How many are kept now.
  static std::size_t count() noexcept;
};

}  // namespace kvpool
