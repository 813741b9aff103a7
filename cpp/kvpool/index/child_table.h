// One hash table for the children of all nodes of a tree: key -> node, open addressing, linear probing.
//
// It grows incrementally: every insertion moves a few entries from the old array to the new one, so no single call pays
// for moving a million entries.
//
// Invariants
//   T1  An entry is in exactly one of the two arrays.
//   T2  No empty slot breaks a probe sequence in `now_` (erase shifts entries back). Nothing is inserted into `old_`;
//       entries that leave it become tombstones.
//   T3  reserve(n) is the only call that allocates; n insertions after it cannot fail.
//
// Thread-safety: none. Keys may collide: the caller's predicate selects the entry.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>

namespace kvpool {

template <class Node>
class ChildTable {
 public:
  ChildTable() = default;
  ~ChildTable() {
    std::free(now_.slots);
    std::free(old_.slots);
  }
  ChildTable(const ChildTable&) = delete;
  ChildTable& operator=(const ChildTable&) = delete;

  std::size_t size() const noexcept { return now_.used + old_.used; }
  std::size_t bytes() const noexcept { return (now_.capacity() + old_.capacity()) * sizeof(Slot); }

  // Makes room for n insertions. Throws std::bad_alloc and changes nothing when there is no memory.
  void reserve(std::size_t n) {
    // Load at most 5/8 of `now_`, counting entries that are still in `old_`.
    if ((size() + n) * 8 <= now_.capacity() * 5) return;
    std::size_t capacity = now_.capacity() == 0 ? 64 : now_.capacity() * 2;
    while ((size() + n) * 8 > capacity * 5) capacity *= 2;
    auto* slots = static_cast<Slot*>(std::calloc(capacity, sizeof(Slot)));
    if (slots == nullptr) throw std::bad_alloc();
    drain(old_.capacity());  // an unfinished move is finished before the next begins
    std::free(old_.slots);
    old_ = now_;
    now_ = Array{slots, capacity - 1, 0};
    drained_ = 0;
    drain(kDrainStep);
  }

  // REQUIRES: reserve() made room.
  void insert(std::uint64_t key, Node* node) noexcept {
    put(key, node);
    drain(kDrainStep);
  }

  template <class Same>
  Node* find(std::uint64_t key, Same&& same) const noexcept {
    if (Node* found = find_in(now_, key, same)) return found;
    return old_.used == 0 ? nullptr : find_in(old_, key, same);
  }

  // REQUIRES: (key, node) is in the table.
  void erase(std::uint64_t key, const Node* node) noexcept {
    if (Slot* slot = locate(now_, key, node)) {
      close_gap(static_cast<std::size_t>(slot - now_.slots));
      --now_.used;
    } else if (Slot* old = locate(old_, key, node)) {
      old->node = tombstone();
      --old_.used;
    }
  }

  // Puts `node` where `from` was, under the same key.
  void replace(std::uint64_t key, const Node* from, Node* node) noexcept {
    Slot* slot = locate(now_, key, from);
    if (slot == nullptr) slot = locate(old_, key, from);
    if (slot != nullptr) slot->node = node;
  }

 private:
  struct Slot {
    std::uint64_t key;
    Node* node;  // null: empty
  };
  struct Array {
    Slot* slots = nullptr;
    std::size_t mask = 0;
    std::size_t used = 0;
    std::size_t capacity() const noexcept { return slots == nullptr ? 0 : mask + 1; }
  };
  static constexpr std::size_t kDrainStep = 16;

  static Node* tombstone() noexcept { return reinterpret_cast<Node*>(alignof(std::max_align_t)); }

  template <class Same>
  static Node* find_in(const Array& array, std::uint64_t key, Same&& same) noexcept {
    if (array.slots == nullptr) return nullptr;
    for (std::size_t i = key & array.mask; array.slots[i].node != nullptr; i = (i + 1) & array.mask) {
      const Slot& slot = array.slots[i];
      if (slot.key == key && slot.node != tombstone() && same(slot.node)) return slot.node;
    }
    return nullptr;
  }

  static Slot* locate(const Array& array, std::uint64_t key, const Node* node) noexcept {
    if (array.slots == nullptr) return nullptr;
    for (std::size_t i = key & array.mask; array.slots[i].node != nullptr; i = (i + 1) & array.mask) {
      if (array.slots[i].node == node) return &array.slots[i];
    }
    return nullptr;
  }

  void put(std::uint64_t key, Node* node) noexcept {
    std::size_t i = key & now_.mask;
    while (now_.slots[i].node != nullptr) i = (i + 1) & now_.mask;
    now_.slots[i] = Slot{key, node};
    ++now_.used;
  }

  // Backward-shift deletion: moves later entries of the probe sequence into the gap while that brings them no nearer
  // than their home slot.
  void close_gap(std::size_t gap) noexcept {
    std::size_t i = gap;
    for (;;) {
      i = (i + 1) & now_.mask;
      if (now_.slots[i].node == nullptr) break;
      const std::size_t home = now_.slots[i].key & now_.mask;
      if (((i - home) & now_.mask) >= ((i - gap) & now_.mask)) {
        now_.slots[gap] = now_.slots[i];
        gap = i;
      }
    }
    now_.slots[gap] = Slot{0, nullptr};
  }

  void drain(std::size_t steps) noexcept {
    if (old_.slots == nullptr) return;
    for (; steps > 0 && drained_ < old_.capacity(); --steps, ++drained_) {
      Slot& slot = old_.slots[drained_];
      if (slot.node == nullptr || slot.node == tombstone()) continue;
      put(slot.key, slot.node);
      slot.node = tombstone();
      --old_.used;
    }
    if (drained_ == old_.capacity()) {
      std::free(old_.slots);
      old_ = Array{};
    }
  }

  Array now_;
  Array old_;
  std::size_t drained_ = 0;  // slots of old_ already looked at
};

}  // namespace kvpool
