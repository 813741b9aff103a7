// From Python's arguments to the core's: counts, flags, names, times. Each raises the package's own errors, with the
// value that is wrong. Vectors: vectors.h.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "kvpool/base/address.h"
#include "kvpool/base/error.h"
#include "kvpool/base/medium.h"

namespace kvpool::bindings {

namespace py = pybind11;

// Raises ArgumentTypeError. If an argument's own method has raised, that exception becomes the cause; one that is no
// Exception, such as KeyboardInterrupt, goes on instead.
[[noreturn]] void throw_type_error(const std::string& message);

[[noreturn]] void throw_argument(const std::string& message, std::initializer_list<ErrorField> fields = {});

std::string type_name(py::handle object);

// A str; bytes that are no UTF-8 become U+FFFD.
py::object text_of(std::string_view text);

// The digits of an int; of one that is too long for Python to print, how many bits it has. Runs no code of the
// caller's.
std::string int_text(py::handle integer);

// The int that an object is by its __index__.
py::object index_from(py::handle argument, const std::string& name);

// A number that is not negative; what does not fit in 63 bits becomes the largest that does.
std::size_t count_from(py::handle argument, const char* name);

// True or False, also NumPy's.
bool flag_from(py::handle argument, const char* name);

// The text of a str, valid as long as the argument is.
std::string_view text_from(py::handle argument, const char* name);
std::string_view name_from(py::handle argument);

// A copy of what a bytes-like object holds. Throws for more than `bytes_max`.
std::vector<std::byte> bytes_from(py::handle argument, const char* name, std::size_t bytes_max);

// Seconds from now as a time of the steady clock; None is `none_ns` from now.
std::int64_t deadline_from(py::handle seconds, std::int64_t none_ns, const char* name = "timeout");
std::int64_t steady_ns() noexcept;

// Throws kUnsupported for DISK, whose blocks nobody can use directly.
MediumChoice medium_choice_from(py::handle argument);
// The same with DISK.
MediumChoice any_medium_from(py::handle argument);

// HBM or DRAM.
Medium medium_from(py::handle argument);

py::array_t<Address> to_array(const Address* values, std::size_t n);

}  // namespace kvpool::bindings
