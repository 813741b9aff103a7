// Pins of keys as values: a match returns them, and they hold until they are released.
#pragma once

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "kvpool/index/keyed_index.h"

namespace kvpool {

// Releases pins: a cache of keyed blocks, or an index that is used alone. Thread-safe.
class KeyPinOwner {
 public:
  virtual ~KeyPinOwner() = default;
  virtual void unpin(std::span<KeyedEntry* const> pins) noexcept = 0;
};

// Move-only; the destructor releases the pins. It keeps its owner alive. Thread-safety: one thread at a time uses an
// object; release() may run in any thread.
class KeyPins {
 public:
  KeyPins() = default;
  KeyPins(std::shared_ptr<KeyPinOwner> owner, std::vector<KeyedEntry*> pins) noexcept
      : owner_(std::move(owner)), pins_(std::move(pins)) {}
  ~KeyPins() { release(); }
  KeyPins(KeyPins&& other) noexcept : owner_(std::move(other.owner_)), pins_(std::move(other.pins_)) {}
  KeyPins& operator=(KeyPins&& other) noexcept {
    if (this != &other) {
      release();
      owner_ = std::move(other.owner_);
      pins_ = std::move(other.pins_);
    }
    return *this;
  }

  bool holds() const noexcept { return owner_ != nullptr; }

  void release() noexcept {
    const std::shared_ptr<KeyPinOwner> owner = std::move(owner_);
    owner_.reset();
    if (owner != nullptr && !pins_.empty()) owner->unpin(pins_);
    pins_.clear();
  }

 private:
  std::shared_ptr<KeyPinOwner> owner_;
  std::vector<KeyedEntry*> pins_;
};

}  // namespace kvpool
