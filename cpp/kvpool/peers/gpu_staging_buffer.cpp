#include "kvpool/peers/gpu_staging_buffer.h"

#include <string>
#include <utility>

#include "kvpool/base/error.h"

namespace kvpool {
namespace {

class GpuStagingBuffer final : public StagingBuffer {
 public:
  GpuStagingBuffer(std::shared_ptr<DeviceStaging> staging, std::vector<iovec>&& pieces, std::size_t bytes)
      : staging_(std::move(staging)), buffer_(staging_->buffer()), pieces_(std::move(pieces)), bytes_(bytes) {}
  iovec room() const noexcept override { return {buffer_->data(), bytes_}; }
  void land() override { staging_->scatter(buffer_->data(), pieces_); }

 private:
  const std::shared_ptr<DeviceStaging> staging_;
  const std::shared_ptr<PinnedBuffer> buffer_;
  const std::vector<iovec> pieces_;
  const std::size_t bytes_;
};

}  // namespace

std::unique_ptr<StagingBuffer> make_gpu_staging_buffer(std::shared_ptr<DeviceStaging> staging,
                                                       std::vector<iovec>& pieces, std::uint64_t bytes) {
  if (bytes > DeviceStaging::kBufferBytes) {
    throw Error(ErrorCode::kProtocol, "a data frame of " + std::to_string(bytes) + " bytes for the memory of a GPU",
                {{"value", static_cast<std::int64_t>(bytes)},
                 {"maximum", static_cast<std::int64_t>(DeviceStaging::kBufferBytes)}});
  }
  return std::make_unique<GpuStagingBuffer>(std::move(staging), std::move(pieces), static_cast<std::size_t>(bytes));
}

}  // namespace kvpool
