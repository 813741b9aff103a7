// Tells AddressSanitizer and LeakSanitizer of memory that does not come from malloc. Does nothing in other builds.
#pragma once

#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#define KVPOOL_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KVPOOL_ASAN 1
#endif
#endif
#ifdef KVPOOL_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/lsan_interface.h>
#define KVPOOL_UNCHECKED __attribute__((no_sanitize("address")))
#else
#define KVPOOL_UNCHECKED
#endif

namespace kvpool {

#ifdef KVPOOL_ASAN
inline void poison(const void* memory, std::size_t bytes) noexcept { __asan_poison_memory_region(memory, bytes); }
inline void unpoison(const void* memory, std::size_t bytes) noexcept { __asan_unpoison_memory_region(memory, bytes); }
// Objects that are only reachable from such memory are not leaks.
inline void declare_mapping(const void* memory, std::size_t bytes) noexcept {
  __lsan_register_root_region(memory, bytes);
}
inline void forget_mapping(const void* memory, std::size_t bytes) noexcept {
  __lsan_unregister_root_region(memory, bytes);
  unpoison(memory, bytes);
}
inline bool is_poisoned(const void* memory) noexcept { return __asan_address_is_poisoned(memory) != 0; }
#else
inline void poison(const void*, std::size_t) noexcept {}
inline void unpoison(const void*, std::size_t) noexcept {}
inline void declare_mapping(const void*, std::size_t) noexcept {}
inline void forget_mapping(const void*, std::size_t) noexcept {}
inline bool is_poisoned(const void*) noexcept { return false; }
#endif

}  // namespace kvpool
