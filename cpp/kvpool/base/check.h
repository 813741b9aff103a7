// Assertions. KVPOOL_CHECK is always on and cheap; KVPOOL_DCHECK is on in debug and sanitizer builds and may be costly.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace kvpool::detail {
[[noreturn]] inline void check_failed(const char* expression, const char* file, int line) noexcept {
  std::fprintf(stderr, "kvpool: invariant broken: %s (%s:%d)\n", expression, file, line);
  std::abort();
}
}  // namespace kvpool::detail

#define KVPOOL_CHECK(expression) \
  ((expression) ? static_cast<void>(0) : ::kvpool::detail::check_failed(#expression, __FILE__, __LINE__))

#ifdef KVPOOL_DEBUG
#define KVPOOL_DCHECK(expression) KVPOOL_CHECK(expression)
#else
#define KVPOOL_DCHECK(expression) static_cast<void>(0)
#endif
