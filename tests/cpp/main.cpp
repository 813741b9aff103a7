// The program of all C++ tests. Run it with -ltc to list the cases and -tc='*pattern*' to run some.
//
//   KVPOOL_SHARD=<i>/<n>    run the i-th of n parts of the cases, i from 1: n processes together run each case once
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cstdio>
#include <cstdlib>
#include <set>

namespace {

// Cases in turn, because slow ones stand beside each other in a file.
bool keep_shard(std::set<doctest::detail::TestCase>& cases, unsigned part, unsigned parts) {
  if (part < 1 || part > parts) return false;
  unsigned at = 0;
  for (auto each = cases.begin(); each != cases.end(); ++at) {
    each = at % parts == part - 1 ? std::next(each) : cases.erase(each);
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  if (const char* shard = std::getenv("KVPOOL_SHARD"); shard != nullptr) {
    unsigned part = 0;
    unsigned parts = 0;
    char rest = 0;
    std::set<doctest::detail::TestCase>& cases = doctest::detail::getRegisteredTests();
    const std::size_t all = cases.size();
    if (std::sscanf(shard, "%u/%u%c", &part, &parts, &rest) != 2 || !keep_shard(cases, part, parts)) {
      std::fprintf(stderr, "KVPOOL_SHARD is '%s'; it can be 1/4 to 4/4, or other numbers\n", shard);
      return 2;
    }
    std::printf("shard %u of %u: %zu of %zu test cases\n", part, parts, cases.size(), all);
    std::fflush(stdout);
    unsetenv("KVPOOL_SHARD");  // not for this program started again by a test that names the case to run
  }
  return doctest::Context(argc, argv).run();
}
