// Checksums and message authentication. CRC-32C detects accidental changes; keyed BLAKE3 detects forged data.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace kvpool {

// Extends `crc`, the CRC-32C (Castagnoli) of the preceding bytes, by `bytes` bytes; 0 to begin. Uses hardware support.
std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t bytes) noexcept;

// One way to compute it.
struct CrcWay {
  const char* name;
  std::uint32_t (*append)(std::uint32_t crc, const void* data, std::size_t bytes) noexcept;
};
// All ways that this processor supports, the fastest first; crc32c() uses the first. The last one is portable.
std::span<const CrcWay> crc32c_ways() noexcept;

using Digest = std::array<std::byte, 32>;

// BLAKE3 in its keyed mode: a MAC. Takes pieces of any size, and gathers short ones, because BLAKE3 is fast (sixteen
// chunks at once) only when it gets many chunks at once. Allocates nothing; the destructor wipes the key.
class KeyedHash {
 public:
  explicit KeyedHash(std::span<const std::byte, 32> key) noexcept;
  ~KeyedHash();
  KeyedHash(const KeyedHash&) = delete;
  KeyedHash& operator=(const KeyedHash&) = delete;
  void update(const void* data, std::size_t bytes) noexcept;
  Digest finish() const noexcept;  // of the bytes so far; more may follow, as fast as before
  void reset() noexcept;           // begins anew with the same key

 private:
  static constexpr std::size_t kStateBytes = 1920;
  static constexpr std::size_t kStateAlign = 8;
  static constexpr std::size_t kGatherBytes = 16384;  // sixteen chunks: what AVX-512 takes at once

  alignas(kStateAlign) std::byte state_[kStateBytes];  // a blake3_hasher
  std::size_t gathered_ = 0;
  std::byte gather_[kGatherBytes];
};

// Derives a key for one purpose from key material. `context`, a constant of the program, names the purpose.
Digest derive_key(std::string_view context, const void* material, std::size_t bytes) noexcept;

// Compares in constant time.
bool equal_secret(const void* left, const void* right, std::size_t bytes) noexcept;

// Overwrites a secret after use; the compiler cannot optimise this away.
void wipe(void* data, std::size_t bytes) noexcept;

}  // namespace kvpool
