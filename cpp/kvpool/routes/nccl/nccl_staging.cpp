#include "kvpool/routes/nccl/nccl_staging.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "kvpool/base/error.h"
#include "kvpool/cuda/wait_word.h"
#include "kvpool/routes/nccl/nccl_cost.h"

namespace kvpool {
namespace {

CuPointer allocate(const CudaContext& context, std::size_t bytes) {
  const CudaDriver& driver = context.driver();
  CuPointer base = 0;
  try {
    driver.require(driver.mem_alloc(&base, bytes), "cuMemAlloc", "blocks cannot travel by NCCL");
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kOutOfMemory) throw;
    // Blocks have the memory, and keep it: there is no use in trying for every transfer.
    throw Error(ErrorCode::kUnsupported,
                std::string(error.what()) + ": there is no room for a pass buffer of " + std::to_string(bytes) +
                    " bytes (the sender's setting nccl_pass_bytes)",
                {{"needed_bytes", static_cast<std::int64_t>(bytes)}});
  }
  add_nccl_staging(context, bytes);
  return base;
}

}  // namespace

// What is kept of one context, and why. Never destroyed.
class NcclShelf {
 public:
  static NcclShelf& of(const CudaContext& context) {
    // Never destroyed: threads may outlive static objects.
    static auto* const mutex = new std::mutex;
    static auto* const all = new std::map<std::pair<const CudaDriver*, CuContext>, NcclShelf>;
    const std::lock_guard lock(*mutex);
    return (*all)[{&context.driver(), context.handle()}];
  }

  void begin() {
    const std::lock_guard lock(mutex_);
    ++passes_;
  }
  void end(const CudaContext& context) noexcept {
    const std::lock_guard lock(mutex_);
    --passes_;
    empty(context);
  }

  CuPointer take(const CudaContext& context, std::size_t& bytes) {
    {
      const std::lock_guard lock(mutex_);
      kept_.reserve(kept_.size() + taken_ + 1);
      ++taken_;
      const auto found = std::ranges::find_if(kept_, [&](const Kept& one) { return one.bytes >= bytes; });
      if (found != kept_.end()) {
        const CuPointer base = found->base;
        bytes = found->bytes;
        kept_.erase(found);
        return base;
      }
    }
    try {
      return allocate(context, bytes);
    } catch (...) {
      const std::lock_guard lock(mutex_);
      --taken_;
      throw;
    }
  }
  void put_back(std::shared_ptr<const CudaContext> context, CuPointer base, std::size_t bytes) noexcept {
    const CudaContext& current = *context;
    const std::lock_guard lock(mutex_);
    --taken_;
    kept_.push_back({std::move(context), base, bytes});  // room for it was reserved
    empty(current);
  }

 private:
  struct Kept {
    std::shared_ptr<const CudaContext> context;  // which lives as long as its memory
    CuPointer base;
    std::size_t bytes;
  };

  // Under the lock: a pass that is to begin waits for what the GPU does, which no pass is a part of.
  void empty(const CudaContext& context) noexcept {
    if (passes_ > 0 || kept_.empty() || words_unset(context)) return;
    for (const Kept& one : kept_) {
      context.driver().mem_free(one.base);
      remove_nccl_staging(context, one.bytes);
    }
    kept_.clear();
  }

  std::mutex mutex_;
  std::size_t passes_ = 0;  // that are under way
  std::size_t taken_ = 0;   // pieces of memory that pipes have
  std::vector<Kept> kept_;
};

NcclStaging::NcclStaging(std::shared_ptr<const CudaContext> context, std::size_t bytes)
    : context_(std::move(context)), shelf_(NcclShelf::of(*context_)), bytes_(bytes) {
  base_ = shelf_.take(*context_, bytes_);
}

NcclStaging::~NcclStaging() { shelf_.put_back(context_, base_, bytes_); }

NcclPassing::NcclPassing(const CudaContext& context) : context_(context), shelf_(NcclShelf::of(context)) {
  shelf_.begin();
}

NcclPassing::~NcclPassing() { shelf_.end(context_); }

}  // namespace kvpool
