// The kinds of memory that a block can lie in, and where blocks can be asked for.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace kvpool {

// Every address contains the code in three bits. 0 names no medium, so no valid address is zero; 4 is free for the next
// medium. Blocks on DISK have no memory: a pool's DiskTier alone reads and writes them, and peers do not see them.
enum class Medium : std::uint8_t { kHbm = 1, kDram = 2, kDisk = 3 };

// All of them. Code that treats media alike iterates over this list.
inline constexpr std::array kMedia{Medium::kHbm, Medium::kDram, Medium::kDisk};

// Position in kMedia.
inline constexpr std::size_t medium_index(Medium medium) noexcept { return static_cast<std::size_t>(medium) - 1; }

// Whether a code, from an address or a message, names a medium.
inline constexpr bool is_medium(std::uint32_t code) noexcept { return code - 1 < kMedia.size(); }

inline constexpr const char* medium_name(Medium medium) noexcept {
  switch (medium) {
    case Medium::kHbm:
      return "HBM";
    case Medium::kDram:
      return "DRAM";
    case Medium::kDisk:
      return "DISK";
  }
  return "unknown";
}

// A T for each medium, in the order of kMedia. Elements without an initializer are T().
template <class T>
struct MediumMap : std::array<T, kMedia.size()> {
  using std::array<T, kMedia.size()>::operator[];
  constexpr T& operator[](Medium medium) noexcept { return (*this)[medium_index(medium)]; }
  constexpr const T& operator[](Medium medium) const noexcept { return (*this)[medium_index(medium)]; }
};

// A T for each pair of media: map[source][target].
template <class T>
using MediumPairMap = MediumMap<MediumMap<T>>;

template <class T>
constexpr MediumMap<T> same_for_all_media(const T& value) {
  MediumMap<T> map{};
  map.fill(value);
  return map;
}

// Where a caller asks for blocks: in one medium, or kMixed (HBM first, the rest DRAM). It is a request and never part
// of an address, whose three bits cannot hold the code of kMixed.
class MediumChoice {
 public:
  static constexpr std::uint8_t kMixedCode = 8;

  constexpr MediumChoice(Medium medium) noexcept  // NOLINT(google-explicit-constructor): a medium is a choice, too
      : code_(static_cast<std::uint8_t>(medium)) {}
  static constexpr bool is_code(std::uint32_t code) noexcept { return is_medium(code) || code == kMixedCode; }
  // REQUIRES: is_code().
  static constexpr MediumChoice from_code(std::uint8_t code) noexcept { return MediumChoice(code); }

  constexpr std::uint8_t code() const noexcept { return code_; }
  constexpr bool is_mixed() const noexcept { return code_ == kMixedCode; }
  constexpr bool includes(Medium medium) const noexcept {
    return is_mixed() ? medium != Medium::kDisk : code_ == static_cast<std::uint8_t>(medium);
  }
  constexpr const char* name() const noexcept { return is_mixed() ? "MIXED" : medium_name(static_cast<Medium>(code_)); }
  constexpr bool operator==(const MediumChoice&) const noexcept = default;

 private:
  explicit constexpr MediumChoice(std::uint8_t code) noexcept : code_(code) {}

  std::uint8_t code_;
};

inline constexpr MediumChoice kMixed = MediumChoice::from_code(MediumChoice::kMixedCode);

}  // namespace kvpool
