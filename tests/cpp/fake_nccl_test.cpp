// The fake NCCL accepts no more than the real one does.
#include "fake_nccl.h"

#include <doctest/doctest.h>

#include <array>
#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "kvpool/cuda/context.h"
#include "kvpool/routes/nccl/nccl_library.h"

#ifdef KVPOOL_FAKE_CUDA

namespace kvpool::testing {
namespace {

constexpr std::size_t kBytes = 256;

// One end of a communicator, with memory and a stream of its GPU.
struct Rank {
  Rank(const NcclLibrary& library, const NcclId& id, int rank, int device)
      : nccl(library), context(CudaContext::retain(device, "a test")) {
    const CurrentContext current(*context, "a test");
    REQUIRE(driver().mem_alloc(&memory, kBytes) == 0);
    REQUIRE(driver().stream_create(&stream, 1) == 0);
    NcclConfig config{sizeof(NcclConfig), 0xcafebeef, kNcclVersionMin, 0, 1, 1, 1, nullptr, 0};
    REQUIRE(nccl.comm_init_rank_config(&comm, 2, id, rank, &config) == kNcclInProgress);
  }
  ~Rank() {
    const CurrentContext current(*context, "a test");
    CHECK(nccl.comm_abort(comm) == kNcclSuccess);
    CHECK(driver().stream_synchronize(stream) == 0);
    CHECK(driver().stream_destroy(stream) == 0);
    CHECK(driver().mem_free(memory) == 0);
  }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  const CudaDriver& driver() const { return context->driver(); }
  NcclResult joined() const {
    NcclResult state = kNcclInProgress;
    while (state == kNcclInProgress) {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
      REQUIRE(nccl.comm_get_async_error(comm, &state) == kNcclSuccess);
    }
    return state;
  }
  NcclResult send(CuPointer from) const {
    const CurrentContext current(*context, "a test");
    return nccl.send(reinterpret_cast<const void*>(from), kBytes, kNcclInt8, 1, comm, stream);
  }

  const NcclLibrary& nccl;
  const std::shared_ptr<const CudaContext> context;
  CuPointer memory = 0;
  CuStream stream = nullptr;
  NcclComm comm = nullptr;
};

TEST_CASE("a communicator sends only from the memory of its GPU") {
  const FakeCuda cuda;
  const FakeNccl fake;
  const NcclLibrary& nccl = load_nccl(fake_nccl_path());
  NcclId id{};
  REQUIRE(nccl.get_unique_id(&id) == kNcclSuccess);
  {
    const Rank first(nccl, id, 0, 0);
    const Rank second(nccl, id, 1, 1);
    REQUIRE(first.joined() == kNcclSuccess);
    REQUIRE(second.joined() == kNcclSuccess);
    const std::array<std::byte, kBytes> host{};
    CHECK(first.send(second.memory) == 4);  // of the neighbouring GPU
    CHECK(first.send(reinterpret_cast<CuPointer>(host.data())) == 4);
    CHECK(first.send(first.memory + 1) == 4);  // and not past its end
    CHECK(first.send(first.memory) == kNcclSuccess);
    {
      const CurrentContext current(*second.context, "a test");
      auto* const to = reinterpret_cast<void*>(second.memory);
      REQUIRE(nccl.recv(to, kBytes, kNcclInt8, 0, second.comm, second.stream) == kNcclSuccess);
      CHECK(second.driver().stream_synchronize(second.stream) == 0);
    }
    CHECK(fake.count("messages") >= 1);
  }
  CHECK(cuda.left() == "");
}

TEST_CASE("two ranks on one GPU are not joined, and both are told why") {
  const FakeCuda cuda;
  const FakeNccl fake;
  const NcclLibrary& nccl = load_nccl(fake_nccl_path());
  NcclId id{};
  REQUIRE(nccl.get_unique_id(&id) == kNcclSuccess);
  const Rank first(nccl, id, 0, 0);
  const Rank second(nccl, id, 1, 0);
  for (const Rank* rank : {&first, &second}) {
    CHECK(rank->joined() == 5);  // ncclInvalidUsage
    const Error told = nccl.error_of(5, "ncclCommInitRankConfig", rank->comm);
    CHECK(told.code() == ErrorCode::kUnsupported);
    CHECK(std::string(told.what()).find("Duplicate GPU detected") != std::string::npos);
  }
}

}  // namespace
}  // namespace kvpool::testing

#endif  // KVPOOL_FAKE_CUDA
