// Pins as values: matches and insertions return them, and they hold until they are released.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "kvpool/index/prompt_index.h"

namespace kvpool {

// Releases pins: a pool, or an index that is used alone. Thread-safe.
class PinOwner {
 public:
  virtual ~PinOwner() = default;
  virtual void unpin(const IndexPin* pins, std::size_t n) noexcept = 0;
};

// Move-only; the destructor releases the pins. It keeps its owner alive, so it may outlive every other reference to the
// pool. Thread-safety: one thread at a time uses an object; release() may run in any thread.
class Pins {
 public:
  Pins() = default;
  Pins(std::shared_ptr<PinOwner> owner, IndexPin pin) noexcept : owner_(std::move(owner)), one_(pin) {}
  Pins(std::shared_ptr<PinOwner> owner, std::vector<IndexPin> pins) noexcept
      : owner_(std::move(owner)), many_(std::move(pins)) {}
  ~Pins() { release(); }
  Pins(Pins&& other) noexcept
      : owner_(std::move(other.owner_)), one_(std::exchange(other.one_, {})), many_(std::move(other.many_)) {}
  Pins& operator=(Pins&& other) noexcept {
    if (this != &other) {
      release();
      owner_ = std::move(other.owner_);
      one_ = std::exchange(other.one_, {});
      many_ = std::move(other.many_);
    }
    return *this;
  }

  bool holds() const noexcept { return owner_ != nullptr; }

  void release() noexcept {
    const std::shared_ptr<PinOwner> owner = std::move(owner_);
    owner_.reset();
    if (owner == nullptr) return;
    if (one_.node != nullptr) owner->unpin(&one_, 1);
    if (!many_.empty()) owner->unpin(many_.data(), many_.size());
    one_ = {};
    many_.clear();
  }

 private:
  std::shared_ptr<PinOwner> owner_;
  IndexPin one_;
  std::vector<IndexPin> many_;
};

}  // namespace kvpool
