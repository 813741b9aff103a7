#include "kvpool/peers/retained_memory.h"

#include <poll.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <thread>
#include <utility>

#include "kvpool/base/signals_blocked.h"

namespace kvpool {
namespace {

constexpr int kLookUs = 1'000;
constexpr int kLookUsMax = 1'000'000;

std::atomic<std::size_t>& kept() {
  static auto* const count = new std::atomic<std::size_t>(0);  // never destroyed: threads may outlive static objects
  return *count;
}

struct Kept {
  std::shared_ptr<void> memory;
  std::vector<LateWriter> writers;
};

void wait_for_end(const Descriptor& process) noexcept {
  pollfd watched{process.get(), POLLIN, 0};
  while (poll(&watched, 1, -1) < 0 && errno == EINTR) {
  }
}

void wait_for_all(std::vector<LateWriter>& writers) noexcept {
  for (LateWriter& writer : writers) {
    int pause = kLookUs;
    while (writer.fence && !writer.fence()) {
      usleep(static_cast<useconds_t>(pause));
      pause = std::min(2 * pause, kLookUsMax);
    }
    if (writer.process) wait_for_end(writer.process);
    std::this_thread::sleep_for(std::chrono::nanoseconds(writer.grace_ns));
  }
  writers.clear();
}

}  // namespace

void RetainedMemory::keep(std::shared_ptr<void> memory, std::vector<LateWriter> writers) noexcept {
  kept().fetch_add(1);
  Kept* kept_here = nullptr;
  const SignalsBlocked blocked;
  try {
    kept_here = new Kept{std::move(memory), std::move(writers)};
    std::thread([kept_here] {
      pthread_setname_np(pthread_self(), "kvpool-keep");
      wait_for_all(kept_here->writers);
      delete kept_here;
      kept().fetch_sub(1);
    }).detach();
  } catch (const std::exception&) {
    // Nobody would see the proof: it stays as it is. NOLINTNEXTLINE(clang-analyzer-cplusplus.NewDeleteLeaks)
    if (kept_here == nullptr) static_cast<void>(new (std::nothrow) std::shared_ptr<void>(std::move(memory)));
  }
}

std::size_t RetainedMemory::count() noexcept { return kept().load(); }

}  // namespace kvpool
