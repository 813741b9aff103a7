// Keeps the memory of pools that were closed while a peer could still write to its addresses: a process that was
// stopped in a write, a process whose GPU has the memory open, or an adapter that UCX has not released. The memory
// stays allocated and unused until it is proved that the peer no longer writes to it.
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

// A party that may still write. If it has a process and a fence, both must prove its end.
struct LateWriter {
  Descriptor process;           // its pidfd: readable when the process has ended; none: nothing to wait for
  std::function<bool()> fence;  // ends writes that arrive here; true when it has. Empty: nothing to end
  std::int64_t grace_ns = 0;    // how long writes that the process had begun may last after its end
};

class RetainedMemory {
 public:
  // A separate thread keeps the memory until the proof. If no thread can be started, the memory is kept for ever.
  static void keep(std::shared_ptr<void> memory, std::vector<LateWriter> writers) noexcept;
  // How many memories are kept now.
  static std::size_t count() noexcept;
};

}  // namespace kvpool
