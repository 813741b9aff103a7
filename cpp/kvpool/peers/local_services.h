// The services of this process, by incarnation. Two pools of one process tell each other directly when their writes
// have ended, because there is no process exit to prove it.
#pragma once

#include <cstdint>

namespace kvpool {

class PeerParting;

// Thread-safety: all of it.
class LocalServices {
 public:
  static void add(std::uint64_t incarnation, PeerParting* parting);
  // Waits for a call that is under way. `may_write`: after this it may still write, for ever, to all of its peers.
  static void remove(std::uint64_t incarnation, bool may_write) noexcept;
  // Tells the pool `to`, if it is in this process, that its peer `from` is drained.
  static void tell_drained(std::uint64_t to, std::uint64_t from) noexcept;
  // Whether the pool `from` is in this process and may still write to its peer `to`.
  static bool may_write(std::uint64_t from, std::uint64_t to) noexcept;
};

}  // namespace kvpool
