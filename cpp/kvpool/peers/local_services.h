// The pools of this process that speak with peers, by incarnation: two of them tell each other directly that nothing is
// written any more, since no process ends between them.
#pragma once

#include <cstdint>

namespace kvpool {

class PeerParting;

// Thread-safety: all of it.
class LocalServices {
 public:
  static void add(std::uint64_t incarnation, PeerParting* parting);
  // Waits for a call that is under way. `may_write`: it has gone, and may write for ever, to whomever it did.
  static void remove(std::uint64_t incarnation, bool may_write) noexcept;
  // The pool `to`, if it is here, hears that its peer `from` is drained.
  static void tell_drained(std::uint64_t to, std::uint64_t from) noexcept;
  // Whether the pool `from` is here and may still write to its peer `to`.
  static bool may_write(std::uint64_t from, std::uint64_t to) noexcept;
};

}  // namespace kvpool
