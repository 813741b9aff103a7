// Tests that need no second thread. ThreadSanitizer has nothing to find in them, and its build leaves their files out.
#pragma once

#include <doctest/doctest.h>

// No case of this file starts a thread, or another process that does. In the other builds the program checks the first:
// a thread that starts in such a case ends it.
#define KVPOOL_ONE_THREAD \
  [[maybe_unused]] const bool DOCTEST_ANONYMOUS(kvpool_one_thread) = ::kvpool::testing::declare_one_thread(__FILE__)

namespace kvpool::testing {

// Returns true. `file`: as __FILE__ gives it.
bool declare_one_thread(const char* file);

}  // namespace kvpool::testing
