// What each slot holds, who uses it, and the checksums of its entry.
//
//   free   --write begins-->  busy  --record durable-->  live
//   live   --erase-->         busy  --record durable-->  free
//
//   1. A live slot is not busy: its bytes on disk do not change.
//   2. A write to a slot begins when the slot is neither live nor busy and has no readers.
//   3. At most one write that has not ended claims a slot; it waits as `waiter` until 2 holds.
//
// Thread-safety: none; the core's mutex guards it. Checksums of a live slot, or one with readers, do not change.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kvpool {

struct Op;

struct Slot {
  Op* waiter = nullptr;
  std::uint64_t generation = 0;  // while live
  std::uint32_t readers = 0;
  bool live = false;
  bool busy = false;
  bool claimed = false;

  bool quiet() const noexcept { return !busy && readers == 0; }
};

class SlotTable {
 public:
  SlotTable(std::uint32_t slots, std::uint32_t pieces)
      : slots_(slots), checksums_(std::size_t{slots} * pieces), pieces_(pieces) {}

  std::uint32_t size() const noexcept { return static_cast<std::uint32_t>(slots_.size()); }
  Slot& operator[](std::uint32_t slot) noexcept { return slots_[slot]; }
  std::span<std::uint32_t> checksums(std::uint32_t slot) noexcept {
    return {checksums_.data() + std::size_t{slot} * pieces_, pieces_};
  }

 private:
  std::vector<Slot> slots_;
  std::vector<std::uint32_t> checksums_;
  std::uint32_t pieces_;
};

}  // namespace kvpool
