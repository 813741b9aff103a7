// What ThreadSanitizer must not report.
//
// _dl_deallocate_tls: the loader was not built with the sanitizer. A thread that has ended leaves its variables of
// libraries opened at run time to the loader, which frees them with the next thread's start.
//
// PeerBlocks::checksum: a borrower may write its lent blocks again while their content is verified (docs/wire.md). The
// peers of strange_frames_test.cpp do. What they write is their own; the checksum then fits or does not.
//
// The sanitizer's library looks the name up in the program, which hides its own names unless told otherwise.
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_suppressions();  // NOLINT: its name
extern "C" const char* __tsan_default_suppressions() {                                        // NOLINT
  return "race:_dl_deallocate_tls\nrace:kvpool::PeerBlocks::checksum\n";
}
