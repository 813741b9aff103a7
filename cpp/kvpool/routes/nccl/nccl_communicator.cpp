#include "kvpool/routes/nccl/nccl_communicator.h"

#include <algorithm>
#include <chrono>
#include <climits>
#include <thread>
#include <utility>

#include "kvpool/base/clock.h"
#include "kvpool/net/reactor.h"

namespace kvpool {
namespace {

constexpr std::int64_t kSpinNs = 50'000;
constexpr std::int64_t kSleepNsMax = 500'000;
constexpr unsigned kMagic = 0xcafebeef;

NcclConfig without_blocking(int thread_blocks_max) {
  NcclConfig config{};
  config.size = sizeof(config);
  config.magic = kMagic;
  config.version = kNcclVersionMin;
  config.blocking = 0;
  config.cga_cluster_size = INT_MIN;  // these are NCCL's to choose
  config.ctas_min = INT_MIN;
  config.ctas_max = thread_blocks_max > 0 ? thread_blocks_max : INT_MIN;
  config.split_share = INT_MIN;
  return config;
}

}  // namespace

void nccl_wait(const std::function<bool()>& done, const NcclCheck& check) {
  const std::int64_t began_ns = monotonic_ns();
  while (!done()) {
    check();
    const std::int64_t waited_ns = monotonic_ns() - began_ns;
    if (waited_ns < kSpinNs) continue;
    std::this_thread::sleep_for(std::chrono::nanoseconds(std::min(waited_ns / 4, kSleepNsMax)));
  }
}

NcclCommunicator::NcclCommunicator(const CudaContext& context, const NcclLibrary& library, const NcclId& id,
                                   NcclWay way, int thread_blocks_max, const NcclCheck& check)
    : library_(library), way_(way), cost_(context) {
  cost_.measure([&] {
    try {
      NcclConfig config = without_blocking(thread_blocks_max);
      const NcclResult begun = library_.comm_init_rank_config(&comm_, 2, id, static_cast<int>(way), &config);
      library_.require(begun, "ncclCommInitRankConfig", comm_);
      await_result("ncclCommInitRankConfig", check);
    } catch (...) {
      if (comm_ != nullptr) library_.comm_abort(comm_);
      throw;
    }
  });
}

NcclCommunicator::~NcclCommunicator() {
  if (comm_ != nullptr) library_.comm_abort(comm_);
}

NcclResult NcclCommunicator::state() const {
  NcclResult state = kNcclSuccess;
  library_.require(library_.comm_get_async_error(comm_, &state), "ncclCommGetAsyncError", comm_);
  return state;
}

// Until NCCL is through with what it was asked. Nothing else may be asked of the communicator, nor be put behind it in
// the stream, before that.
void NcclCommunicator::await_result(const char* call, const NcclCheck& check) const {
  NcclResult now = kNcclInProgress;
  nccl_wait(
      [&] {
        now = state();
        return now != kNcclInProgress;
      },
      check);
  library_.require(now, call, comm_);
}

// NCCL makes some of its buffers when two ranks first meet in a message.
void NcclCommunicator::pass(std::span<const Piece> pieces, CuStream stream, const NcclCheck& check) {
  if (std::exchange(passed_, true)) return put_group(pieces, stream, check);
  cost_.measure([&] { put_group(pieces, stream, check); });
}

void NcclCommunicator::put_group(std::span<const Piece> pieces, CuStream stream, const NcclCheck& check) const {
  const bool sends = way_ == NcclWay::kSend;
  const int peer = 1 - static_cast<int>(way_);
  library_.require(library_.group_start(), "ncclGroupStart", comm_);
  NcclResult refused = kNcclSuccess;
  for (const Piece& piece : pieces) {
    void* at = reinterpret_cast<void*>(piece.at);  // NOLINT(performance-no-int-to-ptr)
    const NcclResult result = sends ? library_.send(at, piece.bytes, kNcclInt8, peer, comm_, stream)
                                    : library_.recv(at, piece.bytes, kNcclInt8, peer, comm_, stream);
    if (result == kNcclSuccess || result == kNcclInProgress) continue;
    refused = result;
    break;
  }
  const NcclResult ended = library_.group_end();  // in any case: a group that stays open takes in what others call
  library_.require(refused, sends ? "ncclSend" : "ncclRecv", comm_);
  library_.require(ended, "ncclGroupEnd", comm_);
  await_result("ncclGroupEnd", check);
}

void NcclCommunicator::check_alive() const {
  const NcclResult now = state();
  if (now != kNcclSuccess && now != kNcclInProgress) throw library_.error_of(now, "a message", comm_);
}

}  // namespace kvpool
