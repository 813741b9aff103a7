#include "one_thread.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>

namespace kvpool::testing {
namespace {

// Filled before main().
std::set<std::string>& files_with_one_thread() {
  static std::set<std::string> files;
  return files;
}

// The case that runs, if its file has declared that it starts no thread.
std::atomic<const char*> alone{nullptr};

struct CaseWatcher final : doctest::IReporter {
  explicit CaseWatcher(const doctest::ContextOptions& /*options*/) {}
  void test_case_start(const doctest::TestCaseData& one) override {
    alone = files_with_one_thread().contains(one.m_file.c_str()) ? one.m_name : nullptr;
  }
  void test_case_end(const doctest::CurrentTestCaseStats& /*stats*/) override { alone = nullptr; }
  void report_query(const doctest::QueryData& /*data*/) override {}
  void test_run_start() override {}
  void test_run_end(const doctest::TestRunStats& /*stats*/) override {}
  void test_case_reenter(const doctest::TestCaseData& /*data*/) override {}
  void test_case_exception(const doctest::TestCaseException& /*data*/) override {}
  void subcase_start(const doctest::SubcaseSignature& /*data*/) override {}
  void subcase_end() override {}
  void log_assert(const doctest::AssertData& /*data*/) override {}
  void log_message(const doctest::MessageData& /*data*/) override {}
  void test_case_skipped(const doctest::TestCaseData& /*data*/) override {}
};
REGISTER_LISTENER("one_thread", 1, CaseWatcher);

}  // namespace

bool declare_one_thread(const char* file) {
  files_with_one_thread().insert(file);
  return true;
}

}  // namespace kvpool::testing

// Stands before the C library's, and before a sanitizer's.
extern "C" __attribute__((visibility("default"))) int pthread_create(pthread_t* thread, const pthread_attr_t* how,
                                                                     void* (*run)(void*), void* argument) {
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto next = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  if (const char* name = kvpool::testing::alone.load(); name != nullptr) {
    std::fprintf(stderr, "a thread starts in '%s', whose file says KVPOOL_ONE_THREAD\n", name);
    std::abort();
  }
  return next(thread, how, run, argument);
}
