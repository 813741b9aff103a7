#include "kvpool/routes/nccl/nccl_pipe.h"

#include <algorithm>
#include <functional>
#include <string>
#include <utility>

#include "kvpool/cuda/wait_word.h"

namespace kvpool {
namespace {

constexpr const char* kWhat = "blocks cannot travel by NCCL";
constexpr int kDrainTries = 3;

CuPointer pointer(const void* address) noexcept {
  return static_cast<CuPointer>(reinterpret_cast<std::uintptr_t>(address));
}

bool is_hbm(Address address) noexcept { return medium_bits_of(address) == static_cast<std::uint32_t>(Medium::kHbm); }

}  // namespace

class NcclPipe::Event {
 public:
  explicit Event(const CudaContext& context) : context_(context) {
    const CudaDriver& driver = context.driver();
    driver.require(driver.event_create(&event_, kCuEventDisableTiming), "cuEventCreate", kWhat);
  }
  ~Event() { context_.driver().event_destroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(const CudaStream& stream) const {
    const CudaDriver& driver = context_.driver();
    driver.require(driver.event_record(event_, stream.handle()), "cuEventRecord", kWhat);
  }
  bool is_done() const {
    const CudaDriver& driver = context_.driver();
    const CuResult result = driver.event_query(event_);
    if (result == kCudaNotReady) return false;
    driver.require(result, "cuEventQuery", kWhat);
    return true;
  }

 private:
  const CudaContext& context_;
  CuEvent event_ = nullptr;
};

NcclPipe::NcclPipe(const NcclMemory& memory, NcclWay way)
    : memory_(memory), way_(way), copier_(memory.context, memory.kernels, memory.bounds, kLinkThreadBlocks, kWhat) {}

NcclPipe::~NcclPipe() { let_go(); }

void NcclPipe::let_go() noexcept {
  const CurrentContext current(*memory_.context);
  if (!current) {  // at the end of the process, or in a forked child: the driver has freed it, or must not be asked to
    static_cast<void>(communicator_.release());
    static_cast<void>(event_.release());
    static_cast<void>(staging_.release());
    return;
  }
  shut();
  staging_.reset();
  event_.reset();
  stream_.reset();
}

NcclId NcclPipe::make_id() const {
  const CurrentContext current(*memory_.context, kWhat);
  NcclId id{};
  memory_.library->require(memory_.library->get_unique_id(&id), "ncclGetUniqueId");
  return id;
}

// All that a pass needs is taken here, and none of it given back to the driver while others pass: nccl_staging.h.
void NcclPipe::open(const NcclId& id, std::uint64_t pass_bytes, const NcclCheck& check) {
  const CurrentContext current(*memory_.context, kWhat);
  shut();
  // Loads NCCL's kernels, and may take memory: both wait for all work of the GPU.
  const Standstill standstill(*memory_.context);
  if (stream_ == nullptr) stream_ = std::make_unique<CudaStream>(memory_.context);
  if (event_ == nullptr) event_ = std::make_unique<Event>(*memory_.context);
  if (staging_ == nullptr || staging_->bytes() < pass_bytes) {
    staging_.reset();
    staging_ = std::make_unique<NcclStaging>(memory_.context, static_cast<std::size_t>(pass_bytes));
  }
  communicator_ = std::make_unique<NcclCommunicator>(*memory_.context, *memory_.library, id, way_,
                                                     memory_.limits.thread_blocks_max, check);
}

void NcclPipe::shut() noexcept {
  if (communicator_ == nullptr) return;
  communicator_.reset();  // NCCL finds the context by itself
  for (int tries = 0; tries < kDrainTries; ++tries) {
    const CurrentContext current(*memory_.context);
    if (!current) continue;
    try {
      return stream_->drain(kWhat);
    } catch (const Error& error) {
      // A driver that could not say at first, and then could: all has ended.
      if (error.code() != ErrorCode::kDeviceLost) return;
    }
  }
  // The GPU, or the context with everything in it, is lost: nothing writes there any more.
}

void NcclPipe::pass(const NcclContent& content, const NcclCheck& check) {
  const CurrentContext current(*memory_.context, kWhat);
  const NcclPassing passing(*memory_.context);
  try {
    run(content, check);
  } catch (...) {
    shut();
    throw;
  }
}

void NcclPipe::run(const NcclContent& content, const NcclCheck& check) {
  pieces_.clear();
  ContentPlan(memory_.local, content.ranges).emit(content.blocks, true, pieces_);
  const bool direct = lies_in_messages(content);
  std::vector<NcclCommunicator::Piece> messages;
  const auto cut = [&](CuPointer at, std::uint64_t bytes) {
    for (std::uint64_t done = 0; done < bytes; done += content.message_bytes) {
      messages.push_back({at + done, std::min(content.message_bytes, bytes - done)});
    }
  };
  if (direct) {
    for (const iovec& piece : pieces_) cut(pointer(piece.iov_base), piece.iov_len);
  } else {
    if (content.bytes > staging_->bytes()) throw Error(ErrorCode::kProtocol, "a pass is longer than was announced");
    cut(staging_->base(), content.bytes);
  }
  if (!direct && way_ == NcclWay::kSend) copy(content);
  communicator_->pass(messages, stream_->handle(), check);
  if (!direct && way_ == NcclWay::kReceive) copy(content);
  wait(check);
}

bool NcclPipe::lies_in_messages(const NcclContent& content) const noexcept {
  if (!std::all_of(content.blocks.begin(), content.blocks.end(), is_hbm)) return false;
  for (std::size_t i = 0; i + 1 < pieces_.size(); ++i) {
    if (pieces_[i].iov_len % content.message_bytes != 0) return false;
  }
  return true;
}

// Between the blocks and the staging memory.
void NcclPipe::copy(const NcclContent& content) {
  const bool sends = way_ == NcclWay::kSend;
  std::byte* staging = reinterpret_cast<std::byte*>(staging_->base());  // NOLINT(performance-no-int-to-ptr)
  const auto medium = [](Address address) { return medium_bits_of(address); };
  if (std::ranges::adjacent_find(content.blocks, std::not_equal_to<>(), medium) != content.blocks.end()) {
    std::vector<CopyPiece> copies;
    copies.reserve(pieces_.size());
    for (const iovec& piece : pieces_) {
      auto* const block = static_cast<std::byte*>(piece.iov_base);
      copies.push_back(sends ? CopyPiece{staging, block, piece.iov_len} : CopyPiece{block, staging, piece.iov_len});
      staging += piece.iov_len;
    }
    return copier_.copy(stream_->handle(), copies);
  }
  std::vector<PlannedStrip> strips =
      cuda::plan_staging(memory_.local[medium(content.blocks.front()) - 1], content.ranges, content.blocks.size(),
                         cuda::StagingOrder::kByRange, staging);
  if (!sends) strips = cuda::reverse(strips);
  // Without a table: the blocks that a pass has at most (kDataBlocksMax) are one launch or two.
  std::vector<Address> places(content.blocks.size());  // in the staging memory
  for (std::uint32_t i = 0; i < places.size(); ++i) places[i] = make_address(0, Medium::kHbm, 0, i);
  const GpuWay way = is_hbm(content.blocks.front()) ? GpuWay::kWithin : sends ? GpuWay::kIn : GpuWay::kOut;
  copier_.copy(stream_->handle(), way, strips, sends ? content.blocks : places, sends ? places : content.blocks,
               /*merge=*/true);
}

// For all that is in the stream; what NCCL has put there may never end by itself.
void NcclPipe::wait(const NcclCheck& check) {
  event_->record(*stream_);
  nccl_wait([this] { return event_->is_done(); },
            [&] {
              check();
              communicator_->check_alive();
            });
  communicator_->check_alive();
}

}  // namespace kvpool
