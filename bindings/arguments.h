// From Python's arguments to the core's: tokens, addresses, counts, names. Each raises the package's own errors, with
// the position and the value that is wrong.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kvpool/base/address.h"
#include "kvpool/base/error.h"
#include "kvpool/index/token_run.h"

namespace kvpool::bindings {

namespace py = pybind11;

[[noreturn]] void throw_type_error(const std::string& message);

// A vector argument as a contiguous array of T: borrowed where the argument already is one, converted otherwise.
// The argument must outlive it.
template <class T>
class Vector {
 public:
  const T* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return size_; }

  void borrow(const T* data, std::size_t size) noexcept {
    data_ = data;
    size_ = size;
  }
  T* own(std::size_t size) {
    owned_.resize(size);
    borrow(owned_.data(), size);
    return owned_.data();
  }
  std::vector<T> copy() const { return std::vector<T>(data_, data_ + size_); }
  // Keeps the exporter of a buffer alive.
  void keep(py::object owner) { owner_ = std::move(owner); }

 private:
  const T* data_ = nullptr;
  std::size_t size_ = 0;
  std::vector<T> owned_;
  py::object owner_;
};

// Token ids: a 1-d NumPy array or buffer of int32 or int64, bytes (as int32 in the machine's order), a list or tuple of
// ints. Every id must fit in int32.
Vector<Token> tokens_from(py::handle argument);

// Addresses: a 1-d NumPy array or buffer of uint64 (or int64), a list or tuple of ints.
Vector<Address> addresses_from(py::handle argument);

// Non-negative numbers below 2^32, from the same kinds of vectors.
std::vector<std::uint32_t> block_numbers_from(py::handle argument);

std::size_t count_from(py::handle argument, const char* name);

// The text of a str, valid as long as the argument is.
std::string_view text_from(py::handle argument, const char* name);
std::string_view name_from(py::handle argument);

// A copy of what a bytes-like object holds. Throws for more than `bytes_max`.
std::vector<std::byte> bytes_from(py::handle argument, const char* name, std::size_t bytes_max);

// Seconds from now as a time of the steady clock; None is `none_ns` from now.
std::int64_t deadline_from(py::handle seconds, std::int64_t none_ns, const char* name = "timeout");
std::int64_t steady_ns() noexcept;

Medium medium_from(py::handle argument);

py::array_t<Address> to_array(const Address* values, std::size_t n);

}  // namespace kvpool::bindings
