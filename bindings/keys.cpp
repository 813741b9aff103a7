#include "keys.h"

#include <array>
#include <cstring>
#include <string>

#include "arguments.h"
#include "kvpool/base/error.h"

namespace kvpool::bindings {
namespace {

constexpr std::size_t kKeysMax = std::size_t{1} << 24;  // as many as a medium has blocks
constexpr std::uint8_t kNoDigit = 0xFF;

constexpr std::array<std::uint8_t, 256> kDigits = [] {
  std::array<std::uint8_t, 256> digits{};
  digits.fill(kNoDigit);
  for (unsigned i = 0; i < 10; ++i) digits['0' + i] = static_cast<std::uint8_t>(i);
  for (unsigned i = 0; i < 6; ++i) {
    digits['a' + i] = static_cast<std::uint8_t>(10 + i);
    digits['A' + i] = static_cast<std::uint8_t>(10 + i);
  }
  return digits;
}();

std::byte* make_room(Keys& keys, std::size_t n, std::size_t key_bytes) {
  if (n > kKeysMax) {
    throw_argument("keys has " + std::to_string(n) + " keys, and may have " + std::to_string(kKeysMax),
                   {{"given", static_cast<std::int64_t>(n)}, {"maximum", static_cast<std::int64_t>(kKeysMax)}});
  }
  keys.n = n;
  return keys.bytes.make(n * key_bytes);
}

[[noreturn]] void throw_length(std::size_t position, std::size_t given, const char* unit, std::size_t wanted) {
  throw_argument("keys[" + std::to_string(position) + "] has " + std::to_string(given) + " " + unit +
                     ", and a key has " + std::to_string(wanted),
                 {{"position", static_cast<std::int64_t>(position)}, {"given", static_cast<std::int64_t>(given)}});
}

// A str of hex digits.
void read_hex(PyObject* text, std::size_t position, std::size_t key_bytes, std::byte* to) {
  const auto length = static_cast<std::size_t>(PyUnicode_GET_LENGTH(text));
  if (length != 2 * key_bytes) throw_length(position, length, "hex digits", 2 * key_bytes);
  const bool ascii = PyUnicode_IS_ASCII(text);
  const auto* digits = ascii ? static_cast<const std::uint8_t*>(PyUnicode_DATA(text)) : nullptr;
  std::uint8_t wrong = ascii ? 0 : kNoDigit;
  for (std::size_t i = 0; ascii && i < key_bytes; ++i) {
    const std::uint8_t high = kDigits[digits[2 * i]];
    const std::uint8_t low = kDigits[digits[2 * i + 1]];
    wrong |= (high | low) & 0xF0;
    to[i] = static_cast<std::byte>(high << 4 | low);
  }
  if (wrong != 0) {
    throw_argument("keys[" + std::to_string(position) + "] is a str that is no hex number",
                   {{"position", static_cast<std::int64_t>(position)}});
  }
}

void read_items(py::handle list, std::size_t key_bytes, Keys& keys) {
  // Nothing here runs code of the caller's, so the list stays as it is.
  PyObject** const items = PySequence_Fast_ITEMS(list.ptr());
  const auto n = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(list.ptr()));
  std::byte* const to = make_room(keys, n, key_bytes);
  for (std::size_t i = 0; i < n; ++i) {
    if (PyBytes_Check(items[i]) != 0) {
      const auto length = static_cast<std::size_t>(PyBytes_GET_SIZE(items[i]));
      if (length != key_bytes) throw_length(i, length, "bytes", key_bytes);
      std::memcpy(to + i * key_bytes, PyBytes_AS_STRING(items[i]), key_bytes);
    } else if (PyUnicode_Check(items[i]) != 0) {
      read_hex(items[i], i, key_bytes, to + i * key_bytes);
    } else {
      throw_type_error("keys[" + std::to_string(i) + "] must be bytes, or a str of hex digits, and is " +
                       type_name(items[i]));
    }
  }
}

struct HeldBuffer {
  ~HeldBuffer() {
    if (view.obj != nullptr) PyBuffer_Release(&view);
  }
  Py_buffer view{};
};

void read_buffer(py::handle argument, std::size_t key_bytes, Keys& keys) {
  HeldBuffer held;
  if (PyObject_CheckBuffer(argument.ptr()) == 0 ||
      PyObject_GetBuffer(argument.ptr(), &held.view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) {
    throw_type_error("keys must be a list of bytes or of hex str, or a contiguous buffer of bytes, and is " +
                     type_name(argument));
  }
  const Py_buffer& view = held.view;
  const std::string format = view.format == nullptr ? "B" : view.format;
  if (view.itemsize != 1 || (format != "B" && format != "b" && format != "c")) {
    throw_type_error("keys in a buffer must be bytes (uint8), and are of format " + format);
  }
  const auto row = view.ndim == 2 ? static_cast<std::size_t>(view.shape[1]) : key_bytes;
  const auto bytes = static_cast<std::size_t>(view.len);
  if (view.ndim > 2 || row != key_bytes || bytes % key_bytes != 0) {
    throw_argument("keys must be [n, " + std::to_string(key_bytes) + "] bytes, or " + std::to_string(key_bytes) +
                       " bytes for each key one after another, and are " + std::to_string(bytes) + " bytes" +
                       (view.ndim == 2 ? " in rows of " + std::to_string(row) : std::string()),
                   {{"given", static_cast<std::int64_t>(bytes)}});
  }
  std::byte* const to = make_room(keys, bytes / key_bytes, key_bytes);
  if (bytes > 0) std::memcpy(to, view.buf, bytes);
}

}  // namespace

Keys keys_from(py::handle argument, std::size_t key_bytes) {
  Keys keys;
  if (PyList_Check(argument.ptr()) != 0 || PyTuple_Check(argument.ptr()) != 0) {
    read_items(argument, key_bytes, keys);
  } else {
    read_buffer(argument, key_bytes, keys);
  }
  return keys;
}

}  // namespace kvpool::bindings
