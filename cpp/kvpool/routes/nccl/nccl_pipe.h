// One direction between two peers on this side's GPU: a communicator, a stream, and staging memory.
//
// Content travels as NCCL messages of one length (the last may be shorter), in the order of ContentPlan, which both
// sides compute from the ranges and the number of blocks. If each message is one run of a side's GPU memory, NCCL reads
// or writes the blocks themselves. Otherwise the sender gathers into staging memory first, and the receiver scatters
// from it afterwards. So the two sides may lay out their blocks differently.
//
// Thread-safety: none; may move between threads.
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

// The memory of a pipe. `local` describes the HBM of the context's GPU, and page-locked DRAM, if any; `keepalive` keeps
// it alive. `kernels` gather and scatter small pieces; if null, the copy engines do.
struct NcclMemory {
  const NcclLibrary* library = nullptr;
  std::shared_ptr<const CudaContext> context;
  MediaSpans local;
  std::shared_ptr<void> keepalive;
  const cuda::KernelSet* kernels = nullptr;
  CopyBounds bounds;  // which pieces are small
  NcclLimits limits;
};

inline constexpr std::uint64_t kNcclMessagesMax = 64;  // of a pass
// Shorter runs are not sent as separate messages, because gathering costs less.
inline constexpr std::uint64_t kNcclMessageBytesMin = std::uint64_t{256} << 10;

struct NcclContent {
  std::span<const ContentRange> ranges;
  std::span<const Address> blocks;
  std::uint64_t bytes;          // in all
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
  // Whether it has allocated nothing on the GPU.
  bool is_empty() const noexcept { return stream_ == nullptr; }
  // An id for open() on both sides. Throws kUnsupported.
  NcclId make_id() const;
  // Allocates `pass_bytes` of staging memory, and returns when the peer has opened its side. Throws as
  // NcclCommunicator, and as CudaDriver::require; kRouteFailed when a stream of this GPU waits for a word (Standstill);
  // kUnsupported when the GPU has no room for the staging memory.
  void open(const NcclId& id, std::uint64_t pass_bytes, const NcclCheck& check);
  // Sends or receives the content; returns when it is in place. Throws the same; then the pipe is shut. REQUIRES:
  // is_open(); the blocks exist, and the ranges lie within their content; bytes is their sum and at most the pass_bytes
  // of open().
  void pass(const NcclContent& content, const NcclCheck& check);
  // Aborts. When it returns, the stream has no work of this pipe, so the pipe reads and writes no block.
  void shut() noexcept;
  // The same, and frees what it has allocated on the GPU. It may be opened again.
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
  std::vector<iovec> pieces_;  // of the current content
};

}  // namespace kvpool
