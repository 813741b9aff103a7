// Counts how many bytes this program copies, for tests of how often a byte is copied on its way.
//
// Counted are, while a CopyCount lives, in all threads: memcpy and memmove of a kilobyte and more, as called from this
// project's own code (the linker's --wrap), and what sendmsg, recvmsg, recv and process_vm_writev have moved. Libraries
// that are opened, as the fake driver, count for themselves.
#pragma once

#include <cstdint>

namespace kvpool::testing {

class CopyCount {
 public:
  CopyCount() noexcept;
  ~CopyCount();
  CopyCount(const CopyCount&) = delete;
  CopyCount& operator=(const CopyCount&) = delete;

  std::uint64_t by_cpu() const noexcept;    // memcpy, memmove
  std::uint64_t by_linux() const noexcept;  // system calls: what is sent and received counts twice
};

}  // namespace kvpool::testing
