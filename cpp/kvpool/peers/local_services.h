// The services of this process, by epoch: two pools of one process tell each other directly that nothing is written any
// more, since no process ends between them.
#pragma once

#include <cstdint>

namespace kvpool {

class LocalService {
 public:
  // The peer with this epoch writes nothing here any more.
  virtual void on_peer_drained(std::uint64_t epoch) noexcept = 0;
  // Whether it may still write to the peer with this epoch; it tells when that is over.
  virtual bool may_write_to(std::uint64_t epoch) noexcept = 0;

 protected:
  ~LocalService() = default;
};

// Thread-safety: all of it.
class LocalServices {
 public:
  static void add(std::uint64_t epoch, LocalService* service);
  // Waits for a call that is under way. `may_write`: it has gone, and may still write to its peers, for ever.
  static void remove(std::uint64_t epoch, bool may_write) noexcept;
  // The service `to`, if it is here, hears that its peer `from` is drained.
  static void tell_drained(std::uint64_t to, std::uint64_t from) noexcept;
  // Whether the service `from` is here and may still write to its peer `to`.
  static bool may_write(std::uint64_t from, std::uint64_t to) noexcept;
};

}  // namespace kvpool
