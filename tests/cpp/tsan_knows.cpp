// What ThreadSanitizer cannot see, because the loader was not built with it: a thread that has ended leaves its
// variables of libraries opened at run time to the loader, which frees them with the next thread's start.
// The sanitizer's library looks the name up in the program, which hides its own names unless told otherwise.
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_suppressions();  // NOLINT: its name
extern "C" const char* __tsan_default_suppressions() { return "race:_dl_deallocate_tls\n"; }  // NOLINT
