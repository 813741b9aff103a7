// Reads and writes messages: little-endian, no padding. Every length is checked before it is used.
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "kvpool/base/check.h"
#include "kvpool/base/error.h"

namespace kvpool {

static_assert(std::endian::native == std::endian::little, "the wire is little-endian, and so is every machine served");

using Bytes = std::vector<std::byte>;

// A bool is no WireNumber: it has two valid values, and a peer can send 256.
template <class T>
concept WireNumber = std::unsigned_integral<T> && !std::same_as<T, bool>;
// A type that can be copied from any bytes. REQUIRES: every bit pattern is a value of each member (no bool, enum or
// pointer).
template <class T>
concept WireElement = std::is_trivially_copyable_v<T> && !std::is_pointer_v<T> && !std::same_as<T, bool>;

class WireWriter {
 public:
  explicit WireWriter(Bytes& out) noexcept : out_(out) {}

  template <WireNumber T>
  WireWriter& number(T value) {
    return raw(&value, sizeof(value));
  }
  // u32 length, then the bytes.
  WireWriter& text(std::string_view text) {
    length(text.size());
    return raw(text.data(), text.size());
  }
  WireWriter& blob(std::span<const std::byte> bytes) {
    length(bytes.size());
    return raw(bytes.data(), bytes.size());
  }
  // u32 count, then the elements.
  template <WireElement T>
  WireWriter& array(std::span<const T> elements) {
    length(elements.size());
    return raw(elements.data(), elements.size_bytes());
  }
  WireWriter& raw(const void* data, std::size_t bytes) {
    const auto* first = static_cast<const std::byte*>(data);
    out_.insert(out_.end(), first, first + bytes);
    return *this;
  }

 private:
  void length(std::size_t count) {
    KVPOOL_CHECK(count <= UINT32_MAX);
    number(static_cast<std::uint32_t>(count));
  }
  Bytes& out_;
};

// Every method throws Error kProtocol when the message ends too early or a count is above what the caller allows.
class WireReader {
 public:
  explicit WireReader(std::span<const std::byte> bytes) noexcept : left_(bytes) {}

  template <WireNumber T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
    return value;
  }
  std::string text(std::size_t bytes_max) {
    const auto bytes = blob(bytes_max);
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  std::span<const std::byte> blob(std::size_t bytes_max) {
    const std::size_t bytes = number<std::uint32_t>();
    if (bytes > bytes_max) fail("a field of " + std::to_string(bytes) + " bytes; at most " + std::to_string(bytes_max));
    return take(bytes);
  }
  template <WireElement T>
  std::vector<T> array(std::size_t count_max) {
    const std::size_t count = number<std::uint32_t>();
    if (count > count_max) fail("a list of " + std::to_string(count) + "; at most " + std::to_string(count_max));
    const auto bytes = take(count * sizeof(T));
    std::vector<T> elements(count);
    if (count > 0) std::memcpy(elements.data(), bytes.data(), bytes.size());
    return elements;
  }
  std::span<const std::byte> take(std::size_t bytes) {
    if (bytes > left_.size()) {
      fail("it ends " + std::to_string(bytes - left_.size()) + " bytes too early");
    }
    const auto taken = left_.first(bytes);
    left_ = left_.subspan(bytes);
    return taken;
  }
  std::size_t left() const noexcept { return left_.size(); }
  // Throws if bytes follow the last field: this version never writes such a message.
  void finish() const {
    if (!left_.empty()) fail(std::to_string(left_.size()) + " bytes too many");
  }

 private:
  [[noreturn]] static void fail(const std::string& what) {
    throw Error(ErrorCode::kProtocol, "a message from the peer is malformed: " + what);
  }
  std::span<const std::byte> left_;
};

}  // namespace kvpool
