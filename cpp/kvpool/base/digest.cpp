#include "kvpool/base/digest.h"

#include <blake3/blake3.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <type_traits>

namespace kvpool {
namespace {

blake3_hasher* hasher_in(std::byte* room) noexcept { return std::launder(reinterpret_cast<blake3_hasher*>(room)); }

// BLAKE3 looks at the processor when it is first used and keeps the answer in a plain variable. One thread does that
// here, before any other can.
void detect_processor() noexcept {
  static const bool detected = [] {
    blake3_hasher hasher;
    blake3_hasher_init(&hasher);
    std::uint8_t digest[BLAKE3_OUT_LEN];
    blake3_hasher_finalize(&hasher, digest, sizeof(digest));
    return true;
  }();
  static_cast<void>(detected);
}

Digest digest_of(const blake3_hasher& hasher) noexcept {
  Digest digest;
  blake3_hasher_finalize(&hasher, reinterpret_cast<std::uint8_t*>(digest.data()), digest.size());
  return digest;
}

}  // namespace

static_assert(std::tuple_size_v<Digest> == BLAKE3_OUT_LEN);

KeyedHash::KeyedHash(std::span<const std::byte, 32> key) noexcept {
  static_assert(sizeof(blake3_hasher) <= kStateBytes && alignof(blake3_hasher) <= kStateAlign);
  static_assert(std::is_trivially_copyable_v<blake3_hasher> && BLAKE3_KEY_LEN == 32);
  detect_processor();
  blake3_hasher_init_keyed(new (state_) blake3_hasher, reinterpret_cast<const std::uint8_t*>(key.data()));
}

KeyedHash::~KeyedHash() { wipe(state_, sizeof(state_)); }

void KeyedHash::update(const void* data, std::size_t bytes) noexcept {
  const auto* from = static_cast<const std::byte*>(data);
  if (gathered_ > 0 || bytes < kGatherBytes) {
    const std::size_t taken = std::min(bytes, kGatherBytes - gathered_);
    if (taken > 0) std::memcpy(gather_ + gathered_, from, taken);
    gathered_ += taken;
    from += taken;
    bytes -= taken;
    if (gathered_ < kGatherBytes) return;
    blake3_hasher_update(hasher_in(state_), gather_, gathered_);
  }
  // Whole groups go without a copy, and begin where BLAKE3's tree has a subtree of their size.
  const std::size_t whole = bytes - bytes % kGatherBytes;
  if (whole > 0) blake3_hasher_update(hasher_in(state_), from, whole);
  gathered_ = bytes - whole;
  if (gathered_ > 0) std::memcpy(gather_, from + whole, gathered_);
}

// What is gathered goes into a copy: hashed into the state itself, it would shift all that follows off the borders of
// BLAKE3's tree, where it hashes sixteen chunks at once.
Digest KeyedHash::finish() const noexcept {
  const blake3_hasher& state = *std::launder(reinterpret_cast<const blake3_hasher*>(state_));
  if (gathered_ == 0) return digest_of(state);
  blake3_hasher copy = state;
  blake3_hasher_update(&copy, gather_, gathered_);
  const Digest digest = digest_of(copy);
  wipe(&copy, sizeof(copy));
  return digest;
}

void KeyedHash::reset() noexcept {
  gathered_ = 0;
  blake3_hasher_reset(hasher_in(state_));
}

Digest derive_key(std::string_view context, const void* material, std::size_t bytes) noexcept {
  detect_processor();
  blake3_hasher hasher;
  blake3_hasher_init_derive_key_raw(&hasher, context.data(), context.size());
  if (bytes > 0) blake3_hasher_update(&hasher, material, bytes);
  const Digest key = digest_of(hasher);
  wipe(&hasher, sizeof(hasher));
  return key;
}

bool equal_secret(const void* left, const void* right, std::size_t bytes) noexcept {
  const auto* a = static_cast<const volatile unsigned char*>(left);
  const auto* b = static_cast<const volatile unsigned char*>(right);
  unsigned char different = 0;
  for (std::size_t i = 0; i < bytes; ++i) different = static_cast<unsigned char>(different | (a[i] ^ b[i]));
  return different == 0;
}

void wipe(void* data, std::size_t bytes) noexcept { explicit_bzero(data, bytes); }

}  // namespace kvpool
