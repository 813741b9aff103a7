#include "kvpool/cuda/staging.h"

#include <new>
#include <utility>

#include "kvpool/cuda/wait_word.h"

namespace kvpool {
namespace {

constexpr std::size_t kKeptMax = 4;

}  // namespace

DeviceStaging::DeviceStaging(std::shared_ptr<const CudaContext> context)
    : copier_(std::move(context), nullptr, {}, "content cannot be copied between the GPU and a buffer"),
      kept_(std::make_shared<Kept>()) {
  kept_->buffers.reserve(kKeptMax);
}

std::shared_ptr<PinnedBuffer> DeviceStaging::buffer() {
  std::unique_ptr<PinnedBuffer> buffer;
  {
    const std::lock_guard lock(kept_->mutex);
    if (!kept_->buffers.empty()) {
      buffer = std::move(kept_->buffers.back());
      kept_->buffers.pop_back();
    }
  }
  if (buffer == nullptr) buffer = std::make_unique<PinnedBuffer>(copier_.context(), kBufferBytes);
  const auto put_back = [kept = kept_, context = copier_.context()](PinnedBuffer* raw) {
    std::unique_ptr<PinnedBuffer> returned(raw);
    // To let go of one may wait for all work of the GPU; not while some of it waits for what buffers bring.
    const bool keeps_all = words_unset(*context);
    const std::lock_guard lock(kept->mutex);
    if (kept->buffers.size() < kKeptMax || keeps_all) kept->keep(returned);
  };
  return {buffer.release(), put_back};
}

void DeviceStaging::Kept::keep(std::unique_ptr<PinnedBuffer>& buffer) noexcept {
  try {
    buffers.push_back(std::move(buffer));
  } catch (const std::bad_alloc&) {  // above what was reserved; the caller lets go of it
  }
}

void DeviceStaging::warm_up() {
  buffer();
  copier_.warm_up();
}

void DeviceStaging::gather(std::span<const iovec> pieces, std::byte* to) {
  std::vector<CopyPiece> copies;
  copies.reserve(pieces.size());
  for (const iovec& piece : pieces) {
    copies.push_back({to, static_cast<const std::byte*>(piece.iov_base), piece.iov_len});
    to += piece.iov_len;
  }
  copier_.copy(copies);
}

void DeviceStaging::scatter(const std::byte* from, std::span<const iovec> pieces) {
  std::vector<CopyPiece> copies;
  copies.reserve(pieces.size());
  for (const iovec& piece : pieces) {
    copies.push_back({static_cast<std::byte*>(piece.iov_base), from, piece.iov_len});
    from += piece.iov_len;
  }
  copier_.copy(copies);
}

}  // namespace kvpool
