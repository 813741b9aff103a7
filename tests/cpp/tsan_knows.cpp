// What ThreadSanitizer cannot see, because the C++ library was not built with it: the text of an exception is shared by
// its copies, and freed by whoever is last, as an atomic count inside the library says.
extern "C" const char* __tsan_default_suppressions();  // NOLINT: the sanitizer's name
extern "C" const char* __tsan_default_suppressions() { return "race:std::runtime_error::~runtime_error\n"; }  // NOLINT
