// How many transfers, saves and sequences read each block of a medium, by its slot (block_store.h). There is no memory
// for it until the first one reads, and then only pages that are touched.
//
// Thread-safety: none; callers hold the lock of the space.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#include "kvpool/base/check.h"

namespace kvpool {

class ReaderCounts {
 public:
  bool empty() const noexcept { return counts_ == nullptr; }
  std::uint32_t size() const noexcept { return size_; }
  // REQUIRES: block < size().
  std::uint16_t operator[](std::uint32_t block) const noexcept {
    KVPOOL_DCHECK(block < size_);
    return counts_[block];
  }
  std::uint16_t& operator[](std::uint32_t block) noexcept {
    KVPOOL_DCHECK(block < size_);
    return counts_[block];
  }
  static std::uint64_t bytes_for(std::uint32_t blocks) noexcept {
    return std::uint64_t{blocks} * sizeof(std::uint16_t);
  }
  // Nobody reads any of so many blocks. REQUIRES: empty(). Throws std::bad_alloc.
  void begin(std::uint32_t blocks) {
    if (blocks == 0) return;
    // calloc, because large zeroed memory comes from the kernel untouched.
    counts_.reset(static_cast<std::uint16_t*>(std::calloc(blocks, sizeof(std::uint16_t))));
    if (counts_ == nullptr) throw std::bad_alloc();
    size_ = blocks;
  }

 private:
  struct FreeMemory {
    void operator()(std::uint16_t* memory) const noexcept { std::free(memory); }
  };
  std::unique_ptr<std::uint16_t[], FreeMemory> counts_;
  std::uint32_t size_ = 0;
};

}  // namespace kvpool
