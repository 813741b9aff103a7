// A library with thread-local memory, opened at run time by dynamic_tls_test.cpp.
#include <cstdlib>

namespace {

// The alignment of malloc and no more: the loader then passes on the address that malloc gave it.
struct alignas(16) PerThread {
  char room[96];
  void* volatile kept;  // or the compiler would leave it out
};
thread_local PerThread per_thread;

}  // namespace

// Only this thread's memory points to what it keeps.
extern "C" void keep_in_thread() { per_thread.kept = std::malloc(40); }
