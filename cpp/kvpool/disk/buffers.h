// Aligned memory for I/O: so many buffers of one size for reads, and so many for writes.
//
// Thread-safety: none; the core's mutex guards it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "kvpool/disk/disk_store.h"

namespace kvpool {

class IoBuffers {
 public:
  // Throws std::bad_alloc. The kernel gives pages when they are used first.
  IoBuffers(std::uint32_t reads, std::uint32_t writes, std::uint64_t bytes)
      : memory_(static_cast<std::byte*>(std::aligned_alloc(kDiskAlignment, (reads + writes) * bytes))) {
    if (memory_ == nullptr) throw std::bad_alloc();
    for (std::uint32_t i = 0; i < reads + writes; ++i)
      (i < reads ? reads_ : writes_).push_back(memory_.get() + i * bytes);
  }

  bool has(bool write) const noexcept { return !(write ? writes_ : reads_).empty(); }
  // REQUIRES: has(write). The buffer that was given back last: it is the likeliest in the processor's cache.
  std::byte* take(bool write) noexcept {
    std::vector<std::byte*>& free = write ? writes_ : reads_;
    std::byte* const buffer = free.back();
    free.pop_back();
    return buffer;
  }
  // No more than were taken, so it allocates nothing.
  void give_back(bool write, std::byte* buffer) noexcept { (write ? writes_ : reads_).push_back(buffer); }

 private:
  struct Free {
    void operator()(std::byte* memory) const noexcept { std::free(memory); }
  };

  std::unique_ptr<std::byte, Free> memory_;
  std::vector<std::byte*> reads_;
  std::vector<std::byte*> writes_;
};

}  // namespace kvpool
