#include "vectors.h"

#include <pybind11/numpy.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string>
#include <type_traits>

#include "arguments.h"
#include "kvpool/base/error.h"

namespace kvpool::bindings {
namespace {

// More than any pool's blocks or any prompt's tokens. With a stride of 0, an array can claim more elements than memory
// has.
constexpr std::size_t kElementsMax = std::size_t{1} << 28;
constexpr py::ssize_t kItemsMax = py::ssize_t{1} << 20;

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
std::string element_name(std::size_t position) {
  return std::string(Kind<T>::kWhat) + "[" + std::to_string(position) + "]";
}

template <class T>
[[noreturn]] void throw_wrong_dtype(const std::string& given) {
  throw_type_error(std::string(Kind<T>::kWhat) + " must be " + Kind<T>::kDtypes + ", and are " + given);
}

template <class T>
[[noreturn]] void throw_out_of_range(std::size_t position, const std::string& value) {
  throw_argument(
      element_name<T>(position) + " = " + value + " does not fit in " + (std::is_same_v<T, Token> ? "int32" : "uint64"),
      {{"position", static_cast<std::int64_t>(position)}});
}

template <class T>
T* make_room(Vector<T>& out, std::size_t n) {
  if (n > kElementsMax) {
    throw_argument(std::string(Kind<T>::kWhat) + " has " + std::to_string(n) + " elements, and may have " +
                       std::to_string(kElementsMax),
                   {{"given", static_cast<std::int64_t>(n)}, {"maximum", static_cast<std::int64_t>(kElementsMax)}});
  }
  return out.make(n);
}

// Reads memory that another thread may be writing. The compiler must not read it a second time in place of the copy.
inline void copy_once(void* to, const void* from, std::size_t bytes) noexcept {
  if (bytes > 0) std::memcpy(to, from, bytes);
  asm volatile("" : : "r"(to) : "memory");
}

// One int, as the core's type.
template <class T>
T element_from(PyObject* item, std::size_t position) {
  if (PyIndex_Check(item) == 0) throw_type_error(element_name<T>(position) + " is " + type_name(item) + ", not an int");
  const auto index = py::reinterpret_steal<py::object>(PyNumber_Index(item));
  if (!index) throw_type_error(element_name<T>(position) + " is " + type_name(item) + ", not an int");
  if constexpr (std::is_same_v<T, Token>) {
    int overflow = 0;
    const long value = PyLong_AsLongAndOverflow(index.ptr(), &overflow);
    if (overflow != 0 || value != static_cast<Token>(value)) throw_out_of_range<T>(position, int_text(index));
    return static_cast<Token>(value);
  } else {
    const unsigned long long value = PyLong_AsUnsignedLongLong(index.ptr());
    if (value == static_cast<unsigned long long>(-1) && PyErr_Occurred() != nullptr) {
      PyErr_Clear();
      throw_out_of_range<T>(position, int_text(index));
    }
    return value;
  }
}

template <class T>
void read_sequence(py::handle argument, Vector<T>& out) {
  PyObject** items = PySequence_Fast_ITEMS(argument.ptr());
  const auto n = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(argument.ptr()));
  T* to = make_room(out, n);
  for (std::size_t i = 0; i < n; ++i) {
    if (PyLong_CheckExact(items[i]) != 0) [[likely]] {
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

// n elements of an integer type S, `stride` bytes apart, each read once.
template <class T, class S>
void read_strided(const char* from, std::size_t n, py::ssize_t stride, Vector<T>& out) {
  T* to = make_room(out, n);
  if (n == 0) return;
  const bool dense = stride == static_cast<py::ssize_t>(sizeof(S));
  if constexpr (sizeof(S) == sizeof(T)) {  // int64 addresses are taken for their bits
    if (dense) return copy_once(to, from, n * sizeof(T));
    for (std::size_t i = 0; i < n; ++i) copy_once(to + i, from + static_cast<py::ssize_t>(i) * stride, sizeof(T));
  } else {
    std::array<S, 256> piece;
    for (std::size_t first = 0; first < n; first += piece.size()) {
      const std::size_t count = std::min(piece.size(), n - first);
      const char* begin = from + static_cast<py::ssize_t>(first) * stride;
      if (dense) {
        copy_once(piece.data(), begin, count * sizeof(S));
      } else {
        for (std::size_t i = 0; i < count; ++i) {
          copy_once(&piece[i], begin + static_cast<py::ssize_t>(i) * stride, sizeof(S));
        }
      }
      S lost = 0;
      for (std::size_t i = 0; i < count; ++i) {
        to[first + i] = static_cast<T>(piece[i]);
        lost |= piece[i] ^ static_cast<S>(static_cast<T>(piece[i]));
      }
      for (std::size_t i = 0; lost != 0 && i < count; ++i) {
        if (static_cast<S>(static_cast<T>(piece[i])) != piece[i]) {
          throw_out_of_range<T>(first + i, std::to_string(piece[i]));
        }
      }
    }
  }
}

// `code` is the array-interface kind ('i', 'u', ...); false when T does not take the type.
template <class T>
bool read_typed(char code, std::size_t size, const char* from, std::size_t n, py::ssize_t stride, Vector<T>& out) {
  if (code == 'i' && size == 8) {
    read_strided<T, std::int64_t>(from, n, stride, out);
  } else if (std::is_same_v<T, Token> && code == 'i' && size == 4) {
    read_strided<T, std::int32_t>(from, n, stride, out);
  } else if (std::is_same_v<T, Address> && code == 'u' && size == 8) {
    read_strided<T, std::uint64_t>(from, n, stride, out);
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
void read_array(const py::array& array, Vector<T>& out) {
  const py::dtype dtype = array.dtype();
  const char order = dtype.byteorder();
  if (array.ndim() != 1) throw_wrong_shape<T>(array.ndim());
  const bool native = order == '=' || order == '|';
  const auto n = static_cast<std::size_t>(array.shape(0));
  if (!native || !read_typed(dtype.kind(), static_cast<std::size_t>(dtype.itemsize()),
                             static_cast<const char*>(array.data()), n, array.strides(0), out)) {
    throw_wrong_dtype<T>(py::str(dtype).cast<std::string>());
  }
}

template <class T>
void read_buffer(py::handle argument, Vector<T>& out) {
  struct Export {
    Py_buffer view{};
    ~Export() { PyBuffer_Release(&view); }
  } held;
  if (PyObject_GetBuffer(argument.ptr(), &held.view, PyBUF_STRIDES | PyBUF_FORMAT) != 0) {
    throw_type_error(std::string(Kind<T>::kWhat) + ": the buffer of " + type_name(argument) + " cannot be read");
  }
  const Py_buffer& view = held.view;
  const std::string format = view.format == nullptr ? "B" : view.format;
  if (view.ndim != 1) throw_wrong_shape<T>(view.ndim);
  const auto* from = static_cast<const char*>(view.buf);
  const auto n = static_cast<std::size_t>(view.shape[0]);
  if (std::is_same_v<T, Token> && view.itemsize == 1 && view.strides[0] == 1 && (format == "B" || format == "c")) {
    if (n % sizeof(Token) != 0) {
      throw_argument("bytes as tokens are int32, and " + std::to_string(n) + " bytes are no multiple of 4");
    }
    copy_once(make_room(out, n / sizeof(Token)), from, n);
    return;
  }
  constexpr char kOwnOrder = std::endian::native == std::endian::little ? '<' : '>';
  const bool prefixed = format.size() == 2 && (format[0] == '@' || format[0] == '=' || format[0] == kOwnOrder);
  const char letter = format.size() == 1 ? format[0] : prefixed ? format[1] : '?';
  const char code = letter == 'i' || letter == 'l' || letter == 'q'   ? 'i'
                    : letter == 'I' || letter == 'L' || letter == 'Q' ? 'u'
                                                                      : '?';
  if (!read_typed(code, static_cast<std::size_t>(view.itemsize), from, n, view.strides[0], out)) {
    throw_wrong_dtype<T>("a buffer of format '" + format + "'");
  }
}

template <class T>
Vector<T> vector_from(py::handle argument) {
  Vector<T> out;
  if (py::isinstance<py::array>(argument)) {
    read_array(py::reinterpret_borrow<py::array>(argument), out);
  } else if (PyList_Check(argument.ptr()) != 0 || PyTuple_Check(argument.ptr()) != 0) {
    read_sequence(argument, out);
  } else if (PyObject_CheckBuffer(argument.ptr()) != 0) {
    read_buffer(argument, out);
  } else {
    throw_type_error(std::string(Kind<T>::kWhat) + " must be a NumPy array, a list, or a buffer of " +
                     Kind<T>::kDtypes + ", and are " + type_name(argument) + " (a torch tensor: pass tensor.numpy())");
  }
  return out;
}

}  // namespace

Vector<Token> tokens_from(py::handle argument) { return vector_from<Token>(argument); }

Vector<Token> tokens_to_find(py::handle argument) {
  if (py::isinstance<py::array>(argument)) {
    const auto array = py::reinterpret_borrow<py::array>(argument);
    const py::dtype dtype = array.dtype();
    const char order = dtype.byteorder();
    const auto* data = static_cast<const Token*>(array.data());
    if (array.ndim() == 1 && dtype.kind() == 'i' && dtype.itemsize() == sizeof(Token) &&
        (order == '=' || order == '|') && array.strides(0) == sizeof(Token) &&
        reinterpret_cast<std::uintptr_t>(data) % alignof(Token) == 0) {
      Vector<Token> out;
      out.borrow(data, static_cast<std::size_t>(array.shape(0)));
      return out;
    }
  }
  return tokens_from(argument);
}

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

std::vector<py::object> items_from(py::handle argument, const std::string& name) {
  std::vector<py::object> items;
  if (PyList_Check(argument.ptr()) != 0 || PyTuple_Check(argument.ptr()) != 0) {
    // Held before the first is read: reading one may run code that changes the list.
    const py::ssize_t n = PySequence_Fast_GET_SIZE(argument.ptr());
    items.reserve(static_cast<std::size_t>(n));
    for (py::ssize_t i = 0; i < n; ++i) {
      items.push_back(py::reinterpret_borrow<py::object>(PySequence_Fast_GET_ITEM(argument.ptr(), i)));
    }
    return items;
  }
  if (PySequence_Check(argument.ptr()) == 0) {
    throw_type_error(name + " must be a list, and is " + type_name(argument));
  }
  const py::ssize_t n = PySequence_Size(argument.ptr());
  if (n < 0) throw_type_error(name + " must be a list, and is " + type_name(argument) + ", which has no length");
  if (n > kItemsMax) {
    throw_argument(name + " has " + std::to_string(n) + " items, and may have " + std::to_string(kItemsMax),
                   {{"given", n}, {"maximum", kItemsMax}});
  }
  for (py::ssize_t i = 0; i < n; ++i) {
    auto item = py::reinterpret_steal<py::object>(PySequence_GetItem(argument.ptr(), i));
    if (!item) throw_type_error(name + "[" + std::to_string(i) + "] cannot be read from " + type_name(argument));
    items.push_back(std::move(item));
  }
  return items;
}

std::vector<std::pair<py::object, py::object>> pairs_from(py::handle argument, const std::string& name) {
  std::vector<std::pair<py::object, py::object>> pairs;
  const std::vector<py::object> items = items_from(argument, name);
  pairs.reserve(items.size());
  for (std::size_t i = 0; i < items.size(); ++i) {
    const std::string own_name = name + "[" + std::to_string(i) + "]";
    std::vector<py::object> pair = items_from(items[i], own_name);
    if (pair.size() != 2) {
      throw_type_error(own_name + " must be (tokens, addresses), and has " + std::to_string(pair.size()) + " items");
    }
    pairs.emplace_back(std::move(pair[0]), std::move(pair[1]));
  }
  return pairs;
}

}  // namespace kvpool::bindings
