#include "kvpool/pool/disk_record.h"

#include <bit>
#include <cstring>

namespace kvpool {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr std::byte kVersion{1};
constexpr std::byte kLater{0};
constexpr std::byte kFirst{1};

void append(std::vector<std::byte>& out, const void* data, std::size_t bytes) {
  const auto* const begin = static_cast<const std::byte*>(data);
  out.insert(out.end(), begin, begin + bytes);
}

template <class T>
void append_value(std::vector<std::byte>& out, T value) {
  append(out, &value, sizeof(value));
}

// Takes from the front of what is left.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) noexcept : rest_(bytes) {}
  std::optional<std::span<const std::byte>> take(std::size_t bytes) noexcept {
    if (bytes > rest_.size()) return std::nullopt;
    const auto front = rest_.first(bytes);
    rest_ = rest_.subspan(bytes);
    return front;
  }
  template <class T>
  std::optional<T> take_value() noexcept {
    const auto bytes = take(sizeof(T));
    if (!bytes) return std::nullopt;
    T value = 0;
    std::memcpy(&value, bytes->data(), sizeof(value));
    return value;
  }
  bool at_end() const noexcept { return rest_.empty(); }

 private:
  std::span<const std::byte> rest_;
};

}  // namespace

std::size_t record_bytes(std::uint32_t page_tokens) noexcept {
  return 2 + 3 * sizeof(std::uint32_t) + sizeof(std::uint64_t) + std::size_t{page_tokens} * sizeof(Token);
}

std::vector<std::byte> encode_record(const std::optional<DiskPlace>& parent, std::span<const Token> tokens,
                                     std::string_view name_space) {
  std::vector<std::byte> out;
  out.reserve(record_bytes(static_cast<std::uint32_t>(tokens.size())) + name_space.size());
  out.push_back(kVersion);
  out.push_back(parent ? kLater : kFirst);
  append_value(out, parent ? parent->slot : 0);
  append_value(out, parent ? parent->generation : 0);
  append_value(out, static_cast<std::uint32_t>(tokens.size()));
  append(out, tokens.data(), tokens.size_bytes());
  if (parent) return out;
  append_value(out, static_cast<std::uint32_t>(name_space.size()));
  append(out, name_space.data(), name_space.size());
  return out;
}

std::optional<DiskRecord> decode_record(std::span<const std::byte> bytes, std::uint32_t page_tokens) noexcept {
  Reader reader(bytes);
  const auto version = reader.take(1);
  const auto first = reader.take(1);
  const auto slot = reader.take_value<std::uint32_t>();
  const auto generation = reader.take_value<std::uint64_t>();
  const auto count = reader.take_value<std::uint32_t>();
  if (!version || version->front() != kVersion || !count || *count != page_tokens) return std::nullopt;
  if (first->front() != kFirst && first->front() != kLater) return std::nullopt;
  const auto tokens = reader.take(std::size_t{page_tokens} * sizeof(Token));
  if (!tokens) return std::nullopt;
  DiskRecord record{std::nullopt, *tokens, {}};
  if (first->front() == kLater) {
    record.parent = {*slot, *generation};
  } else {
    const auto length = reader.take_value<std::uint32_t>();
    const auto name = length ? reader.take(*length) : std::nullopt;
    if (!name) return std::nullopt;
    record.name_space = {reinterpret_cast<const char*>(name->data()), name->size()};
  }
  return reader.at_end() ? std::optional(record) : std::nullopt;
}

}  // namespace kvpool
