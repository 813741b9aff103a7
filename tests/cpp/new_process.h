// For tests that run alone in a separate process, begun anew and not forked.
#pragma once

#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "doctest/doctest.h"

namespace kvpool::testing {

// When a process that runs alone is taken to hang.
inline constexpr std::chrono::seconds kAloneMax{300};

// How the process ends; nothing, and it is killed, when it hangs.
inline std::optional<int> end_of(pid_t child) {
  const auto until = std::chrono::steady_clock::now() + kAloneMax;
  int status = 0;
  for (;;) {
    const pid_t ended = waitpid(child, &status, WNOHANG);
    REQUIRE(ended >= 0);
    if (ended == child) return status;
    if (std::chrono::steady_clock::now() > until) break;
    usleep(5000);
  }
  MESSAGE("process ", child, " hangs, and is killed");
  kill(child, SIGKILL);
  REQUIRE(waitpid(child, &status, 0) == child);
  return std::nullopt;
}

// Runs this test case again, alone, in a new process; true there, false here, where it checks that the other ended
// well. That process has the `variables` ("NAME=value"), and of this one's those whose names begin with none of
// `without`.
inline bool in_new_process(const char* test, const std::vector<std::string>& variables = {},
                           const std::vector<std::string>& without = {}) {
  if (std::getenv("KVPOOL_TEST_ALONE") != nullptr) return true;
  REQUIRE(std::strpbrk(test, ",*") == nullptr);  // doctest would run other cases, or none
  std::vector<std::string> words{"/proc/self/exe", std::string("-tc=") + test, "-m"};
  std::vector<std::string> set{"KVPOOL_TEST_ALONE=1"};
  set.insert(set.end(), variables.begin(), variables.end());
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string inherited(*variable);
    const auto left_out = [&](const std::string& prefix) { return inherited.rfind(prefix, 0) == 0; };
    if (std::none_of(without.begin(), without.end(), left_out)) set.push_back(inherited);
  }
  const auto pointers = [](std::vector<std::string>& strings) {
    std::vector<char*> result;
    for (std::string& each : strings) result.push_back(each.data());
    result.push_back(nullptr);
    return result;
  };
  pid_t child = 0;
  REQUIRE(posix_spawn(&child, words[0].c_str(), nullptr, nullptr, pointers(words).data(), pointers(set).data()) == 0);
  CHECK(end_of(child) == 0);
  return false;
}

}  // namespace kvpool::testing
