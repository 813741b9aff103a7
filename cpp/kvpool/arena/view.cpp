// Arenas over a part of the memory of other arenas.
#include <string>
#include <utility>

#include "kvpool/arena/arena.h"
#include "kvpool/base/address.h"
#include "kvpool/base/error.h"

namespace kvpool {
namespace {

class ViewArena final : public Arena {
 public:
  ViewArena(std::shared_ptr<Arena> base, std::uint32_t blocks, std::size_t block_bytes, std::size_t stride)
      : base_(std::move(base)) {
    if (blocks > kBlocksMax) {
      throw Error(ErrorCode::kArgument,
                  std::to_string(blocks) + " blocks are more than a medium can have (" + std::to_string(kBlocksMax) +
                      "): make the blocks of the model, or the space, of more tokens",
                  {{"blocks", blocks}, {"blocks_max", kBlocksMax}});
    }
    const bool fits = blocks == 0 || (blocks - 1) * stride + block_bytes <= base_->payload_bytes();
    if (block_bytes == 0 || stride == 0 || !fits) {
      throw Error(ErrorCode::kArgument, std::to_string(blocks) + " blocks " + std::to_string(stride) +
                                            " bytes apart do not lie in " + std::to_string(base_->payload_bytes()));
    }
    medium_ = base_->medium();
    blocks_ = blocks;
    block_bytes_ = block_bytes;
    mapped_bytes_ = base_->mapped_bytes();
    huge_page_bytes_ = base_->huge_page_bytes();
    memfd_ = base_->memfd();
    pinned_ = base_->pinned();
    context_ = base_->context();
    segments_ = {Segment{base_->segments().front().base, stride, block_bytes}};
  }

  std::size_t payload_bytes() const noexcept override { return base_->payload_bytes(); }

 private:
  const std::shared_ptr<Arena> base_;
};

}  // namespace

std::shared_ptr<Arena> make_view_arena(std::shared_ptr<Arena> base, std::uint32_t blocks, std::size_t block_bytes,
                                       std::size_t stride) {
  return std::make_shared<ViewArena>(std::move(base), blocks, block_bytes, stride);
}

}  // namespace kvpool
