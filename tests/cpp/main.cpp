// The program of all C++ tests. Run it with -ltc to list the cases and -tc='*pattern*' to run some.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>
