// The route nccl by itself, between two sides in one process.
#include <doctest/doctest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "kvpool/base/clock.h"
#include "kvpool/net/data_body.h"
#include "kvpool/routes/nccl/nccl_route.h"
#include "nccl_pipe_kit.h"
#include "soon.h"
#include "thrown.h"

#ifdef KVPOOL_FAKE_CUDA

namespace kvpool::testing {
using namespace nccl_pipes;  // NOLINT(google-build-using-namespace)
namespace {

TEST_CASE("nccl pipes: scattered strips of scattered blocks arrive, both ways at once and repeatedly") {
  Sides sides;
  std::thread back([&] {
    for (int i = 0; i < 20; ++i) sides.b.write();
  });
  for (int i = 0; i < 20; ++i) sides.a.write();
  back.join();
  CHECK(Sides::arrived(sides.b, 10));
  CHECK(Sides::arrived(sides.a, 20));
  CHECK(sides.nccl.count("ncclCommInitRankConfig") == 4);
  CHECK(sides.nccl.count("mismatches") == 0);
  CHECK(sides.a.placed + sides.b.placed == 40);
}

TEST_CASE("nccl pipes: threads that write at once take turns") {
  Sides sides;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back([&] { sides.a.write(); });
  for (auto& thread : threads) thread.join();
  CHECK(Sides::arrived(sides.b, 10));
  CHECK(sides.b.placed == 4);
}

TEST_CASE("nccl pipes: a kernel gathers and scatters where there is one") {
  FakeCuda cuda;
  const StreamKernels kernels(cuda);
  Sides sides(&kernels.set());
  const int launches = StreamKernels::launches();
  sides.exchange();
  CHECK(StreamKernels::launches() == launches + 2);
}

TEST_CASE("nccl pipes: a communicator that is never complete ends at the deadline, and the next write makes another") {
  Sides sides;
  sides.nccl.set("join", 0);
  CHECK(code_of([&] { sides.a.write(0.2); }) == ErrorCode::kDeadline);
  sides.nccl.set("join", 1);
  sides.exchange();
}

TEST_CASE("nccl pipes: a communicator that is not complete in time has failed, long before the caller's deadline") {
  Sides sides(nullptr, {.init_ns = 200'000'000});
  sides.nccl.set("join", 0);
  std::string text;
  CHECK(code_of([&] { sides.a.write(60); }, &text) == ErrorCode::kRouteFailed);
  CHECK_MESSAGE(text.find("200 ms") != std::string::npos, text);
  sides.nccl.set("join", 1);
  sides.exchange();
}

TEST_CASE("nccl pipes: a receiver that waits in vain for a communicator tells its sender") {
  Sides sides(nullptr, {}, {.init_ns = 200'000'000});
  sides.nccl.set("join", 0);
  std::string text;
  CHECK(code_of([&] { sides.a.write(60); }, &text) == ErrorCode::kRouteFailed);
  CHECK_MESSAGE(text.find("the peer cannot receive by NCCL") != std::string::npos, text);
}

TEST_CASE("nccl pipes: memory for passes is taken when a pipe is opened, as much as the sender asks for") {
  const NcclLimits small{.pass_bytes = std::uint64_t{2} << 20};
  const NcclLimits large{.pass_bytes = std::uint64_t{8} << 20};
  Sides sides(nullptr, small, large);
  const std::size_t before = sides.cuda.count("bytes");
  sides.exchange();
  CHECK(sides.cuda.count("bytes") - before == 2 * small.pass_bytes);
  const std::size_t allocations = sides.cuda.count("cuMemAlloc");
  const std::size_t frees = sides.cuda.count("cuMemFree");
  for (int i = 0; i < 3; ++i) sides.exchange();
  CHECK(sides.cuda.count("cuMemAlloc") == allocations);
  CHECK(sides.cuda.count("cuMemFree") == frees);
  CHECK(sides.b.write().bytes > 0);
  CHECK(sides.cuda.count("bytes") - before == 2 * small.pass_bytes + 2 * large.pass_bytes);
}

TEST_CASE("nccl pipes: a GPU without room for passes cannot use a pipe, and nothing is left of the trial") {
  Sides sides;
  const std::size_t before = sides.cuda.count("bytes");
  sides.cuda.fail("cuMemAlloc", 2);
  std::string text;
  CHECK(code_of([&] { sides.a.write(); }, &text) == ErrorCode::kUnsupported);
  CHECK_MESSAGE(text.find("nccl_pass_bytes") != std::string::npos, text);
  CHECK(soon([&] { return sides.nccl.count("communicators") == 0; }));
  CHECK(sides.cuda.count("bytes") == before);
  CHECK(sides.b.placed == 0);
  sides.cuda.fail("cuMemAlloc", 0);
  sides.exchange();
}

TEST_CASE("nccl pipes: a write that is cancelled has ended on both sides when it throws") {
  Sides sides;
  sides.exchange();
  sides.nccl.set("stall", 1);
  std::atomic<bool> cancelled{false};
  const std::size_t received = sides.nccl.count("ncclRecv");
  std::thread canceller([&] {
    CHECK(soon([&] { return sides.nccl.count("ncclRecv") > received; }));
    cancelled = true;
  });
  CHECK(code_of([&] { sides.a.write(60, &cancelled); }) == ErrorCode::kCancelled);
  canceller.join();
  CHECK(sides.b.given_up == 1);  // nothing is written into these blocks any more
  CHECK(sides.nccl.count("communicators") == 0);
  sides.nccl.set("stall", 0);
  sides.exchange();
}

TEST_CASE("nccl pipes: one direction goes on while the other waits") {
  Sides sides;
  sides.exchange();
  CHECK(sides.b.write().bytes > 0);
  sides.nccl.set("break_in", 1);  // the next message breaks its communicator, and no other
  CHECK(code_of([&] { sides.a.write(); }) == ErrorCode::kRouteFailed);
  const std::size_t made = sides.nccl.count("ncclCommInitRankConfig");
  CHECK(sides.b.write().bytes > 0);
  CHECK(sides.nccl.count("ncclCommInitRankConfig") == made);
  sides.exchange();
}

TEST_CASE("nccl pipes: blocks that do not belong to the sender are refused, and it goes on") {
  Sides sides;
  sides.b.admits = false;
  CHECK(code_of([&] { sides.a.write(); }) == ErrorCode::kNotOwner);
  CHECK(sides.b.placed == 0);
  sides.b.admits = true;
  sides.exchange();
}

TEST_CASE("nccl pipes: a route that is closed, or whose link has ended, ends its writes") {
  Sides sides;
  sides.exchange();
  sides.nccl.set("stall", 1);
  const std::size_t sent = sides.nccl.count("ncclSend");
  std::thread closer([&] {
    CHECK(soon([&] { return sides.nccl.count("ncclSend") > sent; }));
    sides.a.route().close();
  });
  CHECK(code_of([&] { sides.a.write(60); }) == ErrorCode::kPeerLost);
  closer.join();
  std::atomic<bool> closed{false};
  sides.b.route().route_receiver()->close([&] { closed = true; });
  CHECK(soon([&] { return closed.load(); }));
  CHECK(sides.b.given_up == 1);
  CHECK(sides.nccl.count("communicators") == 0);
}

TEST_CASE("nccl pipes: if any NCCL call fails, the write fails or has arrived, and the next one works") {
  for (int n = 1;; ++n) {
    Sides sides;
    sides.clear(sides.b);
    sides.nccl.fail_nth(n, 2);
    const auto error = error_of([&] { sides.a.write(); });
    const bool reached = sides.nccl.failed();
    sides.nccl.fail_nth(0, 0);
    if (error) {
      CHECK_MESSAGE(error->code() == ErrorCode::kRouteFailed, std::string(error->what()));
    } else {
      CHECK(Sides::arrived(sides.b, 10));
    }
    sides.exchange();
    if (!reached || n == 40) break;
  }
}

TEST_CASE("nccl pipes: if any driver call fails, the write fails or has arrived, and the next one works") {
  Sides sides;
  sides.exchange();
  for (int n = 1; n <= 30; ++n) {
    sides.clear(sides.b);
    sides.cuda.fail_nth(n, 801);
    const auto error = error_of([&] { sides.a.write(); });
    sides.cuda.fail_nth(0, 0);
    if (error) {
      const bool own = error->code() == ErrorCode::kUnsupported || error->code() == ErrorCode::kRouteFailed;
      CHECK_MESSAGE(own, std::string(error->what()));
    } else {
      CHECK(Sides::arrived(sides.b, 10));
    }
    sides.exchange();
  }
}

TEST_CASE("nccl pipes: a block that does not exist is refused before anything is announced") {
  Sides sides;
  WriteRequest request;
  const BlockStrip strip{0, 0, 8};
  const Address missing = make_address(1, Medium::kHbm, 0, kPipeBlocks);
  const Address dram = make_address(1, Medium::kDram, 0, 0);
  request.strips = {&strip, 1};
  request.deadline_ns = monotonic_ns() + 1'000'000'000;
  for (const Address& from : {missing, dram}) {
    request.from = {&from, 1};
    request.to = {&from, 1};
    CHECK(code_of([&] { sides.a.route().write(request); }) == ErrorCode::kArgument);
  }
  CHECK(sides.nccl.count("ncclGetUniqueId") == 0);
}

}  // namespace
}  // namespace kvpool::testing

#endif  // KVPOOL_FAKE_CUDA
