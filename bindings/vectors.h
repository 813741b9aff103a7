// From Python's vectors to the core's: tokens, addresses, block numbers, and lists of prompts.
//
// A caller's array is read once, into memory of the call, while this thread holds the GIL. Nothing reads it again.
// (Searching an index does not need the copy: tokens_to_find.)
// NumPy writes arrays without the GIL, so another thread may change one at any moment; what was checked is what is
// used.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "kvpool/base/address.h"
#include "kvpool/index/token_run.h"

namespace kvpool::bindings {

namespace py = pybind11;

// An owned array of T. A thread keeps one buffer for its next call, so that most calls allocate nothing.
template <class T>
class Vector {
 public:
  Vector() = default;
  Vector(Vector&& other) noexcept
      : buffer_(std::exchange(other.buffer_, Buffer{})),
        borrowed_(std::exchange(other.borrowed_, nullptr)),
        size_(std::exchange(other.size_, 0)) {}
  Vector& operator=(Vector&&) = delete;
  ~Vector() {
    if (buffer_.capacity > kept().capacity && buffer_.capacity <= kKeptMax) kept() = std::move(buffer_);
  }

  const T* data() const noexcept { return borrowed_ == nullptr ? buffer_.memory.get() : borrowed_; }
  std::size_t size() const noexcept { return size_; }
  std::vector<T> copy() const { return std::vector<T>(data(), data() + size_); }

  // The memory of somebody else, who keeps it. For what reads it once: kvpool/index/read_once.h.
  void borrow(const T* data, std::size_t n) noexcept {
    borrowed_ = data;
    size_ = n;
  }

  // Room for n elements, not initialised; what was in it is gone. Throws std::bad_alloc.
  T* make(std::size_t n) {
    if (n > buffer_.capacity) {
      buffer_ = std::exchange(kept(), Buffer{});
      if (n > buffer_.capacity) {
        const std::size_t capacity = n < kCapacityMin ? kCapacityMin : n;
        buffer_ = Buffer{std::make_unique_for_overwrite<T[]>(capacity), capacity};
      }
    }
    size_ = n;
    return buffer_.memory.get();
  }

 private:
  struct Buffer {
    std::unique_ptr<T[]> memory;  // NOLINT(modernize-avoid-c-arrays)
    std::size_t capacity = 0;
  };
  static constexpr std::size_t kCapacityMin = 1024;
  static constexpr std::size_t kKeptMax = std::size_t{1} << 18;  // 1 MiB of tokens, 2 MiB of addresses

  static Buffer& kept() noexcept {
    thread_local Buffer buffer;
    return buffer;
  }

  Buffer buffer_;
  const T* borrowed_ = nullptr;
  std::size_t size_ = 0;
};

// Token ids: a 1-d NumPy array or buffer of int32 or int64, bytes (as int32 in the machine's order), a list or tuple of
// ints. Every id must fit in int32.
Vector<Token> tokens_from(py::handle argument);

// The same, for a search in an index: of an array of int32 where it lies, because a search reads each token once.
// REQUIRES: no Python code runs as long as the result is used.
Vector<Token> tokens_to_find(py::handle argument);

// Addresses: a 1-d NumPy array or buffer of uint64 (or int64), a list or tuple of ints.
Vector<Address> addresses_from(py::handle argument);

// Non-negative numbers below 2^32, from the same kinds of vectors.
std::vector<std::uint32_t> block_numbers_from(py::handle argument);

// The items of a list, a tuple or another sequence. Of another sequence, which may say anything of its length, a
// million at most.
std::vector<py::object> items_from(py::handle argument, const std::string& name);

// The two items of each item of a sequence: (tokens, addresses) of each prompt.
std::vector<std::pair<py::object, py::object>> pairs_from(py::handle argument, const std::string& name);

}  // namespace kvpool::bindings
