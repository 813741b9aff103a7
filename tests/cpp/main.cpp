// The program of all C++ tests. Run it with -ltc to list the cases and -tc='*pattern*' to run some.
//
//   KVPOOL_SHARD=<i>/<n>    run the i-th of n parts of the cases, i from 1: n processes together run each case once
//
// SIGTERM ends it and says which case was running.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>

namespace {

std::atomic<const char*> running{nullptr};  // a test case's name, or nothing between them

// Only for its calls when a case begins and ends.
class Running : public doctest::IReporter {
 public:
  explicit Running(const doctest::ContextOptions& /*options*/) {}
  void test_case_start(const doctest::TestCaseData& test) override { running = test.m_name; }
  void test_case_reenter(const doctest::TestCaseData& /*test*/) override {}
  void test_case_end(const doctest::CurrentTestCaseStats& /*stats*/) override { running = nullptr; }
  void report_query(const doctest::QueryData& /*data*/) override {}
  void test_run_start() override {}
  void test_run_end(const doctest::TestRunStats& /*stats*/) override {}
  void test_case_exception(const doctest::TestCaseException& /*error*/) override {}
  void subcase_start(const doctest::SubcaseSignature& /*subcase*/) override {}
  void subcase_end() override {}
  void log_assert(const doctest::AssertData& /*data*/) override {}
  void log_message(const doctest::MessageData& /*data*/) override {}
  void test_case_skipped(const doctest::TestCaseData& /*test*/) override {}
};
REGISTER_LISTENER("running", 1, Running);

void say_and_end(int signal) {
  const char* name = running;
  const auto say = [](const char* text) { return write(STDERR_FILENO, text, std::strlen(text)) >= 0; };
  const bool said = say("ended while running: ") && say(name == nullptr ? "no test case" : name) && say("\n");
  _exit(said ? 128 + signal : EXIT_FAILURE);
}

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
  signal(SIGTERM, say_and_end);
  return doctest::Context(argc, argv).run();
}
