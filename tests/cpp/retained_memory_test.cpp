#include "kvpool/peers/retained_memory.h"

#include <doctest/doctest.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <vector>

#include "kvpool/base/clock.h"
#include "kvpool/net/reactor.h"

namespace kvpool {
namespace {

template <class Holds>
bool soon(Holds&& holds) {
  const std::int64_t until = monotonic_ns() + 60'000'000'000;
  while (!holds() && monotonic_ns() < until) usleep(1000);
  return holds();
}

TEST_CASE("memory is kept until every proof that its writers are gone has come, and is then freed") {
  const std::size_t before = RetainedMemory::count();
  auto memory = std::make_shared<int>(7);
  const std::weak_ptr<int> left = memory;
  std::atomic<bool> fenced{false};
  std::atomic<int> asked{0};
  std::vector<LateWriter> writers(2);
  writers[0].process = Descriptor::open([] { return eventfd(0, EFD_CLOEXEC); });  // readable as a pidfd becomes
  const int process = writers[0].process.get();
  writers[1].fence = [&] {
    ++asked;
    return fenced.load();
  };
  RetainedMemory::keep(std::move(memory), std::move(writers));
  CHECK(RetainedMemory::count() == before + 1);
  CHECK_FALSE(left.expired());
  CHECK(eventfd_write(process, 1) == 0);
  CHECK(soon([&] { return asked >= 3; }));
  CHECK_FALSE(left.expired());
  fenced = true;
  CHECK(soon([&] { return left.expired(); }));
  CHECK(soon([&] { return RetainedMemory::count() == before; }));
}

TEST_CASE("memory that a GPU may still write is kept for a while after the process that started the work has ended") {
  constexpr std::int64_t kGrace = 100'000'000;
  auto memory = std::make_shared<int>(7);
  const std::weak_ptr<int> left = memory;
  std::vector<LateWriter> writers(1);
  writers[0].process = Descriptor::open([] { return eventfd(1, EFD_CLOEXEC); });  // it has ended
  writers[0].grace_ns = kGrace;
  const std::int64_t began = monotonic_ns();
  RetainedMemory::keep(std::move(memory), std::move(writers));
  CHECK(soon([&] { return left.expired(); }));
  CHECK(monotonic_ns() - began >= kGrace);
}

}  // namespace
}  // namespace kvpool
