// The search for leaks at a process's end looks at the thread-local memory of libraries that were opened at run time.
// It once crashed there, now and then (sanitizers.cpp says why). So many threads never let it get through.
#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "doctest/doctest.h"
#include "fake_paths.h"
#include "new_process.h"
#include "soon.h"

namespace kvpool::testing {

TEST_CASE("a process ends well with threads that use a library's thread-local memory") {
  if (!in_new_process("a process ends well with threads that use a library's thread-local memory")) return;
  constexpr int kThreads = 400;
  void* library = dlopen(dynamic_tls_path(), RTLD_NOW | RTLD_LOCAL);
  REQUIRE(library != nullptr);
  const auto keep = reinterpret_cast<void (*)()>(dlsym(library, "keep_in_thread"));
  REQUIRE((keep != nullptr));
  static std::atomic<int> kept{0};
  for (int i = 0; i < kThreads; ++i) {
    std::thread([keep] {
      keep();
      ++kept;
      for (;;) pause();
    }).detach();
  }
  sleep_while([&] { return kept < kThreads; });
}

}  // namespace kvpool::testing
