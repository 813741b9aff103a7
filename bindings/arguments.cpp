#include "arguments.h"

#include <chrono>
#include <cstring>
#include <limits>
#include <string>

#include "kvpool/pool/pool.h"

namespace kvpool::bindings {
namespace {

constexpr std::size_t kDigitsMax = 60;  // of a number in a message

// What an argument's own method has raised, or nothing. What is no Exception is nobody's to replace.
py::object take_raised() {
  if (PyErr_Occurred() == nullptr) return {};
  if (PyErr_ExceptionMatches(PyExc_Exception) == 0) throw py::error_already_set();
  return py::error_already_set().value();
}

}  // namespace

void throw_type_error(const std::string& message) {
  const py::object cause = take_raised();
  const py::object type = py::module_::import("kvpool.errors").attr("ArgumentTypeError");
  py::object error = type(text_of(message));
  if (cause) PyException_SetCause(error.ptr(), py::object(cause).release().ptr());
  PyErr_SetObject(type.ptr(), error.ptr());
  throw py::error_already_set();
}

void throw_argument(const std::string& message, std::initializer_list<ErrorField> fields) {
  throw Error(ErrorCode::kArgument, message, fields);
}

py::object text_of(std::string_view text) {
  return py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<py::ssize_t>(text.size()), "replace"));
}

std::string type_name(py::handle object) { return Py_TYPE(object.ptr())->tp_name; }

std::string int_text(py::handle integer) {
  const auto digits = py::reinterpret_steal<py::object>(PyLong_Type.tp_repr(integer.ptr()));
  if (digits) {
    const auto text = digits.cast<std::string>();
    return text.size() <= kDigitsMax ? text : text.substr(0, kDigitsMax) + "...";
  }
  PyErr_Clear();  // Python prints no int of more than some thousand digits
  const py::object bits = py::handle(reinterpret_cast<PyObject*>(&PyLong_Type)).attr("bit_length")(integer);
  return "an int of " + py::str(bits).cast<std::string>() + " bits";
}

py::object index_from(py::handle argument, const std::string& name) {
  py::object index;
  if (PyIndex_Check(argument.ptr()) != 0) {
    index = py::reinterpret_steal<py::object>(PyNumber_Index(argument.ptr()));
  }
  if (!index) throw_type_error(name + " must be an int, and is " + type_name(argument));
  return index;
}

std::size_t count_from(py::handle argument, const char* name) {
  const py::object index = index_from(argument, name);
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow > 0) return std::numeric_limits<std::int64_t>::max();
  if (overflow < 0 || value < 0) {
    throw_argument(std::string(name) + " must not be negative, and is " + int_text(index),
                   {{"value", overflow < 0 ? std::numeric_limits<std::int64_t>::min() : value}});
  }
  return static_cast<std::size_t>(value);
}

bool flag_from(py::handle argument, const char* name) {
  if (argument.is(py::handle(Py_True))) return true;
  if (argument.is(py::handle(Py_False))) return false;
  const std::string type = type_name(argument);
  if (type != "numpy.bool" && type != "numpy.bool_") {
    throw_type_error(std::string(name) + " must be a bool, and is " + type);
  }
  const int truth = PyObject_IsTrue(argument.ptr());
  if (truth < 0) throw_type_error(std::string(name) + " must be a bool, and is " + type);
  return truth != 0;
}

std::string_view text_from(py::handle argument, const char* name) {
  if (PyUnicode_Check(argument.ptr()) == 0) {
    throw_type_error(std::string(name) + " must be a str, and is " + type_name(argument));
  }
  py::ssize_t size = 0;
  const char* data = PyUnicode_AsUTF8AndSize(argument.ptr(), &size);
  if (data == nullptr) {
    PyErr_Clear();
    const auto shown = py::reinterpret_steal<py::object>(PyUnicode_Type.tp_repr(argument.ptr()));
    if (!shown) throw py::error_already_set();
    throw_argument(std::string(name) + " " + shown.cast<std::string>() + " cannot be encoded as UTF-8");
  }
  return {data, static_cast<std::size_t>(size)};
}

std::string_view name_from(py::handle argument) { return text_from(argument, "namespace"); }

std::vector<std::byte> bytes_from(py::handle argument, const char* name, std::size_t bytes_max) {
  Py_buffer view;
  if (PyObject_CheckBuffer(argument.ptr()) == 0 || PyObject_GetBuffer(argument.ptr(), &view, PyBUF_SIMPLE) != 0) {
    throw_type_error(std::string(name) + " must be bytes or like them, and is " + type_name(argument));
  }
  std::vector<std::byte> bytes;
  const auto size = static_cast<std::size_t>(view.len);
  const auto* first = static_cast<const std::byte*>(view.buf);
  if (size <= bytes_max) bytes.assign(first, first + size);
  PyBuffer_Release(&view);
  if (size > bytes_max) {
    throw_argument(
        std::string(name) + " has " + std::to_string(size) + " bytes, and may have " + std::to_string(bytes_max),
        {{"given", static_cast<std::int64_t>(size)}, {"maximum", static_cast<std::int64_t>(bytes_max)}});
  }
  return bytes;
}

std::int64_t steady_ns() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

std::int64_t deadline_from(py::handle seconds, std::int64_t none_ns, const char* name) {
  constexpr double kSecondsMax = 1e9;  // and its nanoseconds, and the clock's, fit in 64 bits
  const std::int64_t now = steady_ns();
  if (seconds.is_none()) {
    return none_ns > std::numeric_limits<std::int64_t>::max() - now ? std::numeric_limits<std::int64_t>::max()
                                                                    : now + none_ns;
  }
  const bool is_bool = PyBool_Check(seconds.ptr()) != 0;
  double value = is_bool ? -1.0 : PyFloat_AsDouble(seconds.ptr());
  if (PyErr_Occurred() != nullptr && PyLong_CheckExact(seconds.ptr()) != 0) {  // more than a float can be
    PyErr_Clear();
    value = std::numeric_limits<double>::infinity();
  }
  if (is_bool || PyErr_Occurred() != nullptr) {
    throw_type_error(std::string(name) + " must be seconds, a float or an int, and is " + type_name(seconds));
  }
  if (!(value >= 0 && value <= kSecondsMax)) {
    throw_argument(std::string(name) + " is " + std::to_string(value) +
                   "; it must be seconds, not negative, and a billion at most");
  }
  return now + static_cast<std::int64_t>(value * 1e9);
}

MediumChoice any_medium_from(py::handle argument) {
  if (PyLong_Check(argument.ptr()) == 0 || PyBool_Check(argument.ptr()) != 0) {
    throw_type_error("medium must be kvpool.HBM, kvpool.DRAM or kvpool.MIXED, and is " + type_name(argument));
  }
  const std::size_t value = count_from(argument, "medium");
  if (value > UINT8_MAX || !MediumChoice::is_code(static_cast<std::uint32_t>(value))) {
    throw_argument(
        "medium must be kvpool.HBM (1), kvpool.DRAM (2) or kvpool.MIXED (8), and is " + std::to_string(value),
        {{"value", static_cast<std::int64_t>(value)}});
  }
  return MediumChoice::from_code(static_cast<std::uint8_t>(value));
}

MediumChoice medium_choice_from(py::handle argument) {
  const MediumChoice choice = any_medium_from(argument);
  Pool::check_kept(choice);
  return choice;
}

Medium medium_from(py::handle argument) {
  const MediumChoice choice = medium_choice_from(argument);
  if (choice != MediumChoice(Medium::kHbm) && choice != MediumChoice(Medium::kDram)) {
    throw_argument("medium must be kvpool.HBM (1) or kvpool.DRAM (2)");
  }
  return choice == MediumChoice(Medium::kHbm) ? Medium::kHbm : Medium::kDram;
}

py::array_t<Address> to_array(const Address* values, std::size_t n) {
  py::array_t<Address> array(static_cast<py::ssize_t>(n));
  if (n > 0) std::memcpy(array.mutable_data(), values, n * sizeof(Address));
  return array;
}

}  // namespace kvpool::bindings
