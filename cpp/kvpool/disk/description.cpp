#include "kvpool/disk/description.h"

#include <algorithm>
#include <cctype>
#include <cstring>

#include "kvpool/base/digest.h"
#include "kvpool/base/error.h"

namespace kvpool {
namespace {

// magic[8], version, bytes of all, then the fields below, and at the end a CRC-32C of all before it.
constexpr char kMagic[8] = {'k', 'v', 'p', 'o', 'o', 'l', '\r', '\n'};
constexpr std::size_t kPrefixBytes = sizeof(kMagic) + 2 * sizeof(std::uint32_t);
constexpr std::size_t kShownBytes = 200;  // of a value, in messages

template <class T>
void put(std::vector<std::byte>& bytes, const T& value) {
  const auto* const at = reinterpret_cast<const std::byte*>(&value);
  bytes.insert(bytes.end(), at, at + sizeof(value));
}

void put_text(std::vector<std::byte>& bytes, const std::string& text) {
  put(bytes, static_cast<std::uint32_t>(text.size()));
  const auto* const at = reinterpret_cast<const std::byte*>(text.data());
  bytes.insert(bytes.end(), at, at + text.size());
}

[[noreturn]] void throw_damaged_description() {
  throw Error(ErrorCode::kState, "the store on disk is damaged: kvpool.store has a wrong checksum. Nothing was changed")
      .because(ErrorCause::kDamaged);
}

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}
  template <class T>
  T get() {
    T value;
    std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
    return value;
  }
  std::string text() {
    const auto size = get<std::uint32_t>();
    const std::span<const std::byte> taken = take(size);
    return {reinterpret_cast<const char*>(taken.data()), taken.size()};
  }

 private:
  std::span<const std::byte> take(std::size_t bytes) {
    if (bytes > bytes_.size()) throw_damaged_description();
    const std::span<const std::byte> taken = bytes_.first(bytes);
    bytes_ = bytes_.subspan(bytes);
    return taken;
  }

  std::span<const std::byte> bytes_;
};

std::string shown(const std::string& value) {
  const bool printable = std::all_of(value.begin(), value.end(), [](unsigned char c) { return std::isprint(c) != 0; });
  if (printable && value.size() <= kShownBytes) return "'" + value + "'";
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const char c : value.substr(0, 8)) {
    text += kDigits[static_cast<unsigned char>(c) >> 4];
    text += kDigits[static_cast<unsigned char>(c) & 15];
  }
  return text + (value.size() > 8 ? "..." : "") + " (" + std::to_string(value.size()) + " bytes)";
}

const std::string* value_of(const std::vector<std::pair<std::string, std::string>>& format, const std::string& name) {
  for (const auto& [key, value] : format) {
    if (key == name) return &value;
  }
  return nullptr;
}

[[noreturn]] void throw_other_number(const char* what, std::uint64_t there, std::uint64_t asked) {
  throw Error(
      ErrorCode::kLayoutMismatch,
      "the store on disk was made for " + std::to_string(there) + " " + what + ", and " + std::to_string(asked) +
          " are asked for: another directory, or the same number",
      {{"offered_bytes", static_cast<std::int64_t>(there)}, {"layout_bytes", static_cast<std::int64_t>(asked)}});
}

}  // namespace

std::vector<std::byte> StoreDescription::encoded() const {
  std::vector<std::byte> bytes;
  put(bytes, kMagic);
  put(bytes, kDiskVersion);
  put(bytes, std::uint32_t{0});
  put(bytes, id);
  put(bytes, slots);
  put(bytes, block_bytes);
  put(bytes, kDiskPieceBytes);
  put(bytes, static_cast<std::uint32_t>(format.size()));
  for (const auto& [name, value] : format) {
    put_text(bytes, name);
    put_text(bytes, value);
  }
  const auto size = static_cast<std::uint32_t>(bytes.size() + sizeof(std::uint32_t));
  std::memcpy(bytes.data() + sizeof(kMagic) + sizeof(kDiskVersion), &size, sizeof(size));
  put(bytes, crc32c(0, bytes.data(), bytes.size()));
  return bytes;
}

StoreDescription StoreDescription::decoded(std::span<const std::byte> bytes) {
  if (bytes.size() < kPrefixBytes || std::memcmp(bytes.data(), kMagic, sizeof(kMagic)) != 0) {
    throw Error(ErrorCode::kState, "kvpool.store is no file of kvpool. Nothing was changed")
        .because(ErrorCause::kForeign);
  }
  Reader reader(bytes.subspan(sizeof(kMagic)));
  const auto version = reader.get<std::uint32_t>();
  if (version != kDiskVersion) {
    throw Error(ErrorCode::kUnsupported, "the store on disk has version " + std::to_string(version) +
                                             " of the format, and this build reads version " +
                                             std::to_string(kDiskVersion) + ". Nothing was changed");
  }
  const auto size = reader.get<std::uint32_t>();
  std::uint32_t crc = 0;
  if (size != bytes.size() || size < kPrefixBytes + sizeof(crc)) throw_damaged_description();
  std::memcpy(&crc, bytes.data() + size - sizeof(crc), sizeof(crc));
  if (crc32c(0, bytes.data(), size - sizeof(crc)) != crc) throw_damaged_description();
  StoreDescription found;
  found.id = reader.get<DiskId>();
  found.slots = reader.get<std::uint32_t>();
  found.block_bytes = reader.get<std::uint64_t>();
  if (reader.get<std::uint64_t>() != kDiskPieceBytes) throw_damaged_description();
  for (auto left = reader.get<std::uint32_t>(); left > 0; --left) {
    std::string name = reader.text();
    std::string value = reader.text();
    found.format.emplace_back(std::move(name), std::move(value));
  }
  return found;
}

void StoreDescription::require(const DiskOptions& options) const {
  for (const auto& [name, value] : options.format) {
    const std::string* const there = value_of(format, name);
    if (there != nullptr && *there == value) continue;
    throw Error(ErrorCode::kLayoutMismatch, "the store on disk was made for another " + name + ": it has " +
                                                (there != nullptr ? shown(*there) : "none") + ", and this pool " +
                                                shown(value) + ". Nothing was changed");
  }
  for (const auto& [name, value] : format) {
    if (value_of(options.format, name) != nullptr) continue;
    throw Error(ErrorCode::kLayoutMismatch, "the store on disk was made for another " + name + ": it has " +
                                                shown(value) + ", and this pool none. Nothing was changed");
  }
  if (block_bytes != options.block_bytes) throw_other_number("bytes a block", block_bytes, options.block_bytes);
  if (slots != options.slots) throw_other_number("blocks", slots, options.slots);
}

}  // namespace kvpool
