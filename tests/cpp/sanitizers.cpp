// What the sanitizers must know of this program.
//
// AddressSanitizer: LeakSanitizer looks for pointers in the memory that the loader has given the thread-local variables
// of libraries opened at run time. Where a block of that memory lies 16 bytes into a page, the versions up to GCC 12
// take what stands before it for a header of glibc 2.19, read a wrong address there, and crash
// (dynamic_tls_test.cpp). Without intercept_tls_get_addr they don't record those blocks; the search still sees them, as
// memory that the loader allocated. ThreadSanitizer reads the same header, and wants memory of a wrong length: whether
// it does depends on how long the environment is.
//
// ThreadSanitizer must not report:
//
// _dl_deallocate_tls: the loader was not built with the sanitizer. A thread that has ended leaves its variables of
// libraries opened at run time to the loader, which frees them with the next thread's start.
//
// PeerBlocks::checksum: a borrower may write its lent blocks again while their content is verified (docs/wire.md). The
// peers of strange_frames_test.cpp do. What they write is their own; the checksum then fits or does not.
//
// The sanitizers' libraries look these names up in the program, which hides its own names unless told otherwise.
extern "C" __attribute__((visibility("default"))) const char* __asan_default_options();       // NOLINT: its name
extern "C" const char* __asan_default_options() { return "intercept_tls_get_addr=0"; }        // NOLINT
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_options();       // NOLINT: its name
extern "C" const char* __tsan_default_options() { return "intercept_tls_get_addr=0"; }        // NOLINT
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_suppressions();  // NOLINT: its name
extern "C" const char* __tsan_default_suppressions() {                                        // NOLINT
  return "race:_dl_deallocate_tls\nrace:kvpool::PeerBlocks::checksum\n";
}
