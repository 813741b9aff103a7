#include "arguments.h"

#include <bit>
#include <chrono>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>

namespace kvpool::bindings {
namespace {

std::string type_name(py::handle object) { return Py_TYPE(object.ptr())->tp_name; }

[[noreturn]] void throw_argument(const std::string& message, std::initializer_list<ErrorField> fields = {}) {
  throw Error(ErrorCode::kArgument, message, fields);
}

template <class T>
struct Kind;
template <>
struct Kind<Token> {
  static constexpr const char* kWhat = "tokens";
  static constexpr const char* kDtypes = "int32 or int64";
};
template <>
struct Kind<Address> {
  static constexpr const char* kWhat = "addresses";
  static constexpr const char* kDtypes = "uint64";
};

template <class T>
[[noreturn]] void throw_wrong_dtype(const std::string& given) {
  throw_type_error(std::string(Kind<T>::kWhat) + " must be " + Kind<T>::kDtypes + ", and are " + given);
}

template <class T>
[[noreturn]] void throw_out_of_range(std::size_t position, const std::string& value) {
  throw_argument(std::string(Kind<T>::kWhat) + "[" + std::to_string(position) + "] = " + value + " does not fit in " +
                     (std::is_same_v<T, Token> ? "int32" : "uint64"),
                 {{"position", static_cast<std::int64_t>(position)}});
}

// One int, as the core's type.
template <class T>
T element_from(PyObject* item, std::size_t position) {
  if constexpr (std::is_same_v<T, Token>) {
    int overflow = 0;
    const long value = PyLong_AsLongAndOverflow(item, &overflow);
    if (value == -1 && PyErr_Occurred() != nullptr) {
      PyErr_Clear();
      throw_type_error("tokens[" + std::to_string(position) + "] is " + type_name(item) + ", not an int");
    }
    if (overflow != 0 || value != static_cast<Token>(value)) {
      throw_out_of_range<T>(position, py::str(py::handle(item)).cast<std::string>());
    }
    return static_cast<Token>(value);
  } else {
    py::object index = py::reinterpret_steal<py::object>(PyNumber_Index(item));
    if (!index) {
      PyErr_Clear();
      throw_type_error("addresses[" + std::to_string(position) + "] is " + type_name(item) + ", not an int");
    }
    const unsigned long long value = PyLong_AsUnsignedLongLong(index.ptr());
    if (value == static_cast<unsigned long long>(-1) && PyErr_Occurred() != nullptr) {
      PyErr_Clear();
      throw_out_of_range<T>(position, py::str(index).cast<std::string>());
    }
    return value;
  }
}

template <class T>
void convert_sequence(py::handle argument, Vector<T>& out) {
  PyObject** items = PySequence_Fast_ITEMS(argument.ptr());
  const auto n = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(argument.ptr()));
  T* to = out.own(n);
  for (std::size_t i = 0; i < n; ++i) {
    if (PyLong_Check(items[i]) != 0) [[likely]] {
      to[i] = element_from<T>(items[i], i);
      continue;
    }
    // Its __index__ may run any code, also code that changes the list.
    const auto item = py::reinterpret_borrow<py::object>(items[i]);
    to[i] = element_from<T>(item.ptr(), i);
    if (static_cast<std::size_t>(PySequence_Fast_GET_SIZE(argument.ptr())) != n) {
      throw_argument(std::string(Kind<T>::kWhat) + " changed while they were read");
    }
    items = PySequence_Fast_ITEMS(argument.ptr());
  }
}

// n elements of an integer type S, `stride` bytes apart.
template <class T, class S>
void convert_strided(const char* from, std::size_t n, py::ssize_t stride, Vector<T>& out) {
  constexpr bool kSameBits = sizeof(S) == sizeof(T);  // int64 addresses are taken for their bits
  if (kSameBits && stride == static_cast<py::ssize_t>(sizeof(T)) &&
      reinterpret_cast<std::uintptr_t>(from) % alignof(T) == 0) {
    out.borrow(reinterpret_cast<const T*>(from), n);
    return;
  }
  T* to = out.own(n);
  bool fits = true;
  const auto load = [&](std::size_t i) {
    S value;
    std::memcpy(&value, from + static_cast<py::ssize_t>(i) * stride, sizeof value);
    return value;
  };
  for (std::size_t i = 0; i < n; ++i) {
    const S value = load(i);
    to[i] = static_cast<T>(value);
    if constexpr (!kSameBits) fits = fits && static_cast<S>(to[i]) == value;
  }
  if (fits) return;
  for (std::size_t i = 0; i < n; ++i) {
    if (static_cast<S>(static_cast<T>(load(i))) != load(i)) throw_out_of_range<T>(i, std::to_string(load(i)));
  }
}

// `code` is the array-interface kind ('i', 'u', ...); false when the type is none that T takes.
template <class T>
bool convert_typed(char code, std::size_t size, const char* from, std::size_t n, py::ssize_t stride, Vector<T>& out) {
  if (code == 'i' && size == 8) {
    convert_strided<T, std::int64_t>(from, n, stride, out);
  } else if (std::is_same_v<T, Token> && code == 'i' && size == 4) {
    convert_strided<T, std::int32_t>(from, n, stride, out);
  } else if (std::is_same_v<T, Address> && code == 'u' && size == 8) {
    convert_strided<T, std::uint64_t>(from, n, stride, out);
  } else {
    return false;
  }
  return true;
}

template <class T>
[[noreturn]] void throw_wrong_shape(py::ssize_t dimensions) {
  throw_argument(std::string(Kind<T>::kWhat) + " must have one dimension, and have " + std::to_string(dimensions));
}

template <class T>
void convert_array(const py::array& array, Vector<T>& out) {
  const py::dtype dtype = array.dtype();
  const char order = dtype.byteorder();
  if (array.ndim() != 1) throw_wrong_shape<T>(array.ndim());
  const bool native = order == '=' || order == '|';
  const auto n = static_cast<std::size_t>(array.shape(0));
  if (!native || !convert_typed(dtype.kind(), static_cast<std::size_t>(dtype.itemsize()),
                                static_cast<const char*>(array.data()), n, array.strides(0), out)) {
    throw_wrong_dtype<T>(py::str(dtype).cast<std::string>());
  }
}

template <class T>
void convert_buffer(py::handle argument, Vector<T>& out) {
  auto view = py::reinterpret_borrow<py::buffer>(argument).request();
  const std::string format = view.format;
  if (view.ndim != 1) throw_wrong_shape<T>(view.ndim);
  if (std::is_same_v<T, Token> && view.itemsize == 1 && view.strides[0] == 1 && (format == "B" || format == "c")) {
    if (view.size % 4 != 0) {
      throw_argument("bytes as tokens are int32, and " + std::to_string(view.size) + " bytes are no multiple of 4");
    }
    T* to = out.own(static_cast<std::size_t>(view.size / 4));
    if (view.size > 0) std::memcpy(to, view.ptr, static_cast<std::size_t>(view.size));
    return;
  }
  constexpr char kOwnOrder = std::endian::native == std::endian::little ? '<' : '>';
  const bool prefixed = format.size() == 2 && (format[0] == '@' || format[0] == '=' || format[0] == kOwnOrder);
  const char letter = format.size() == 1 ? format[0] : prefixed ? format[1] : '?';
  const char code = letter == 'i' || letter == 'l' || letter == 'q'   ? 'i'
                    : letter == 'I' || letter == 'L' || letter == 'Q' ? 'u'
                                                                      : '?';
  if (!convert_typed(code, static_cast<std::size_t>(view.itemsize), static_cast<const char*>(view.ptr),
                     static_cast<std::size_t>(view.shape[0]), view.strides[0], out)) {
    throw_wrong_dtype<T>("a buffer of format '" + format + "'");
  }
  // The view ends here, so borrowed memory must be kept by an export of its own.
  out.keep(py::memoryview(py::reinterpret_borrow<py::object>(argument)));
}

template <class T>
Vector<T> vector_from(py::handle argument) {
  Vector<T> out;
  if (py::isinstance<py::array>(argument)) {
    convert_array(py::reinterpret_borrow<py::array>(argument), out);
  } else if (PyList_Check(argument.ptr()) != 0 || PyTuple_Check(argument.ptr()) != 0) {
    convert_sequence(argument, out);
  } else if (PyObject_CheckBuffer(argument.ptr()) != 0) {
    convert_buffer(argument, out);
  } else {
    throw_type_error(std::string(Kind<T>::kWhat) + " must be a NumPy array, a list, or a buffer of " +
                     Kind<T>::kDtypes + ", and are " + type_name(argument) + " (a torch tensor: pass tensor.numpy())");
  }
  return out;
}

}  // namespace

void throw_type_error(const std::string& message) {
  py::object type = py::module_::import("kvpool.errors").attr("ArgumentTypeError");
  PyErr_SetObject(type.ptr(), py::str(message).ptr());
  throw py::error_already_set();
}

Vector<Token> tokens_from(py::handle argument) { return vector_from<Token>(argument); }

Vector<Address> addresses_from(py::handle argument) { return vector_from<Address>(argument); }

std::vector<std::uint32_t> block_numbers_from(py::handle argument) {
  const Vector<Address> wide = vector_from<Address>(argument);
  std::vector<std::uint32_t> blocks(wide.size());
  for (std::size_t i = 0; i < wide.size(); ++i) {
    if (wide.data()[i] >= kBlocksMax) {
      throw_argument("block number " + std::to_string(static_cast<std::int64_t>(wide.data()[i])) + " (position " +
                         std::to_string(i) + ") is not in [0, " + std::to_string(kBlocksMax) + ")",
                     {{"position", static_cast<std::int64_t>(i)}});
    }
    blocks[i] = static_cast<std::uint32_t>(wide.data()[i]);
  }
  return blocks;
}

std::size_t count_from(py::handle argument, const char* name) {
  py::object index = py::reinterpret_steal<py::object>(PyNumber_Index(argument.ptr()));
  if (!index) {
    PyErr_Clear();
    throw_type_error(std::string(name) + " must be an int, and is " + type_name(argument));
  }
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow > 0) return std::numeric_limits<std::int64_t>::max();
  if (overflow < 0 || value < 0) {
    throw_argument(std::string(name) + " must not be negative, and is " + py::str(index).cast<std::string>(),
                   {{"value", overflow < 0 ? std::numeric_limits<std::int64_t>::min() : value}});
  }
  return static_cast<std::size_t>(value);
}

std::string_view text_from(py::handle argument, const char* name) {
  if (PyUnicode_Check(argument.ptr()) == 0) {
    throw_type_error(std::string(name) + " must be a str, and is " + type_name(argument));
  }
  py::ssize_t size = 0;
  const char* data = PyUnicode_AsUTF8AndSize(argument.ptr(), &size);
  if (data == nullptr) {
    PyErr_Clear();
    throw_argument(std::string(name) + " " + py::repr(argument).cast<std::string>() + " cannot be encoded as UTF-8");
  }
  return {data, static_cast<std::size_t>(size)};
}

std::string_view name_from(py::handle argument) { return text_from(argument, "namespace"); }

std::vector<std::byte> bytes_from(py::handle argument, const char* name, std::size_t bytes_max) {
  Py_buffer view;
  if (PyObject_CheckBuffer(argument.ptr()) == 0 || PyObject_GetBuffer(argument.ptr(), &view, PyBUF_SIMPLE) != 0) {
    PyErr_Clear();
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
  const double value = PyBool_Check(seconds.ptr()) != 0 ? -1.0 : PyFloat_AsDouble(seconds.ptr());
  if (PyErr_Occurred() != nullptr || PyBool_Check(seconds.ptr()) != 0) {
    PyErr_Clear();
    throw_type_error(std::string(name) + " must be seconds, a float or an int, and is " + type_name(seconds));
  }
  if (!(value >= 0 && value <= kSecondsMax)) {
    throw_argument(std::string(name) + " is " + std::to_string(value) +
                   "; it must be seconds, not negative, and a billion at most");
  }
  return now + static_cast<std::int64_t>(value * 1e9);
}

Medium medium_from(py::handle argument) {
  if (PyLong_Check(argument.ptr()) == 0) {
    throw_type_error("medium must be kvpool.HBM, kvpool.DRAM or kvpool.MIXED, and is " + type_name(argument));
  }
  const std::size_t value = count_from(argument, "medium");
  if (value < 1 || value > 3) {
    throw_argument(
        "medium must be kvpool.HBM (1), kvpool.DRAM (2) or kvpool.MIXED (3), and is " + std::to_string(value),
        {{"value", static_cast<std::int64_t>(value)}});
  }
  return static_cast<Medium>(value);
}

py::array_t<Address> to_array(const Address* values, std::size_t n) {
  py::array_t<Address> array(static_cast<py::ssize_t>(n));
  if (n > 0) std::memcpy(array.mutable_data(), values, n * sizeof(Address));
  return array;
}

}  // namespace kvpool::bindings
