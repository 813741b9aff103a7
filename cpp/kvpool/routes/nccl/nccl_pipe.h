// One direction between two peers on this side's GPU: a communicator, a stream, and staging memory.
//
// Content travels as NCCL messages of one length (the last may be shorter), in the order of ContentPlan, which both
// sides know from the ranges and the number of blocks. A side whose blocks hold each message in one run of its GPU's
// memory passes the blocks themselves; another gathers into staging memory before it sends, or scatters after it has
// received. So the sides need not agree on how their blocks lie.
//
// Thread-safety: none; may go from thread to thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "kvpool/base/segment.h"
#include "kvpool/base/strips.h"
#include "kvpool/cuda/kernels.h"
#include "kvpool/cuda/stream.h"
#include "kvpool/cuda/stream_copier.h"
#include "kvpool/routes/nccl/nccl_communicator.h"
#include "kvpool/routes/nccl/nccl_limits.h"
#include "kvpool/routes/nccl/nccl_staging.h"

namespace kvpool {

// What a pipe stands on. `local` describes memory that `keepalive` keeps: HBM of the context's GPU, and page-locked
// DRAM or none. `kernels`: what gathers and scatters small pieces; null: the copy engines.
struct NcclMemory {
  const NcclLibrary* library = nullptr;
  std::shared_ptr<const CudaContext> context;
  MediaSpans local;
  std::shared_ptr<void> keepalive;
  const cuda::KernelSet* kernels = nullptr;
  CopyBounds bounds;  // of what those copy
  NcclLimits limits;
};

inline constexpr std::uint64_t kNcclMessagesMax = 64;  // of a pass
// Shorter messages are not worth one each: gathering costs less.
inline constexpr std::uint64_t kNcclMessageBytesMin = std::uint64_t{256} << 10;

struct NcclContent {
  std::span<const ContentRange> ranges;
  std::span<const Address> blocks;
  std::uint64_t bytes;          // of all of it
  std::uint64_t message_bytes;  // of each message but the last
};

class NcclPipe {
 public:
  // Throws as StreamCopier.
  NcclPipe(const NcclMemory& memory, NcclWay way);
  ~NcclPipe();
  NcclPipe(const NcclPipe&) = delete;
  NcclPipe& operator=(const NcclPipe&) = delete;

  bool is_open() const noexcept { return communicator_ != nullptr; }
  // Has taken nothing of the GPU.
  bool is_empty() const noexcept { return stream_ == nullptr; }
  // For open(), of both sides. Throws kUnsupported.
  NcclId make_id() const;
  // Takes the staging memory, `pass_bytes` of it, and returns when the peer has opened its side. Throws as
  // NcclCommunicator, and as CudaDriver::require; kRouteFailed when a stream of this GPU waits for a word (Standstill);
  // kUnsupported when the GPU has no room for the staging memory.
  void open(const NcclId& id, std::uint64_t pass_bytes, const NcclCheck& check);
  // Sends the content, or receives it; returns when it is where it belongs. Throws the same; then the pipe is shut.
  // REQUIRES: is_open(); the ranges lie within the content of the blocks, which exist; bytes is their sum and at most
  // what open() was told.
  void pass(const NcclContent& content, const NcclCheck& check);
  // Aborts. When it returns nothing of this pipe is in the stream any more, so no block is read or written by it.
  void shut() noexcept;
  // The same, and gives back what it has taken of the GPU. It may be opened again.
  void let_go() noexcept;

 private:
  class Event;

  void run(const NcclContent& content, const NcclCheck& check);
  bool lies_in_messages(const NcclContent& content) const noexcept;
  void copy(const NcclContent& content);
  void wait(const NcclCheck& check);

  const NcclMemory memory_;
  const NcclWay way_;
  StreamCopier copier_;
  std::unique_ptr<NcclCommunicator> communicator_;
  std::unique_ptr<CudaStream> stream_;
  std::unique_ptr<Event> event_;
  std::unique_ptr<NcclStaging> staging_;
  std::vector<iovec> pieces_;  // of the content that is being passed
};

}  // namespace kvpool
