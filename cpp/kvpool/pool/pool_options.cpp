#include "kvpool/pool/pool_options.h"

#include <string>

#include "kvpool/base/address.h"
#include "kvpool/base/error.h"
#include "kvpool/disk/disk_store.h"
#include "kvpool/pool/disk_record.h"

namespace kvpool {
namespace {

void check_sharding(const PoolOptions& options) {
  if (options.sharding->shape().block_bytes() != options.layout.block_bytes()) {
    throw Error(ErrorCode::kArgument, "the shape of a block and its layout differ");
  }
  if (options.adopted_hbm || options.zero_on_alloc || options.pin_dram || options.device >= 0) {
    throw Error(ErrorCode::kArgument,
                "the memory of a logical instance is its ranks': adopted tensors and a device are given to "
                "RankArena.join, and zero_on_alloc is not to be had");
  }
}

void check_disk(const PoolOptions& options) {
  const DiskTierOptions& disk = *options.disk;
  if (disk.blocks < 1 || disk.blocks > kBlocksMax || disk.path.empty()) {
    throw Error(ErrorCode::kArgument,
                "disk_blocks is " + std::to_string(disk.blocks) + ", from 1 to " + std::to_string(kBlocksMax) +
                    " with a disk_path: a pool has both or neither",
                {{"value", disk.blocks}, {"minimum", 1}, {"maximum", kBlocksMax}});
  }
  if (options.dram_blocks == 0) {
    throw Error(ErrorCode::kArgument, "blocks come from DISK to DRAM: a pool with disk_blocks needs dram_blocks");
  }
  if (record_bytes(options.layout.block_tokens) > kDiskMetaBytesMax) {
    throw Error(ErrorCode::kArgument,
                "blocks of " + std::to_string(options.layout.block_tokens) + " tokens are too long for a disk",
                {{"block_tokens", options.layout.block_tokens}});
  }
  if (options.sharding || options.adopted_hbm || options.engine_allocates) {
    throw Error(ErrorCode::kUnsupported,
                "a pool with blocks on DISK owns its memory: no adopted tensors, and no logical instance");
  }
}

}  // namespace

const PoolOptions& checked(const PoolOptions& options) {
  if (options.layout.block_tokens == 0) throw Error(ErrorCode::kArgument, "block_tokens must be at least 1");
  if (options.layout.piece_bytes.empty()) throw Error(ErrorCode::kArgument, "a block needs at least one piece");
  const std::uint32_t hbm = options.blocks_in_hbm();
  for (const std::uint32_t blocks : {hbm, options.dram_blocks}) {
    if (blocks > kBlocksMax) {
      throw Error(ErrorCode::kArgument,
                  std::to_string(blocks) + " blocks; a medium has at most " + std::to_string(kBlocksMax),
                  {{"requested", blocks}, {"capacity", kBlocksMax}});
    }
  }
  if (hbm == 0 && options.dram_blocks == 0) {
    throw Error(ErrorCode::kArgument, "a pool needs blocks: hbm_blocks and dram_blocks are both 0");
  }
  if (options.copy_threads < 1 || options.copy_threads > 256) {
    throw Error(ErrorCode::kArgument, "copy_threads must be 1 to 256, and is " + std::to_string(options.copy_threads));
  }
  if (options.sharding) check_sharding(options);
  if (options.disk) check_disk(options);
  if (options.engine_allocates && !options.adopted_hbm && !options.sharding) {
    throw Error(ErrorCode::kArgument, "engine_allocates is for adopted tensors, of this pool or of its ranks");
  }
  if (options.hbm_device() >= 0 && hbm > 0 && options.dram_blocks > 0 && !options.pin_dram) {
    throw Error(ErrorCode::kArgument,
                "a pool on a GPU swaps with page-locked DRAM: pin_dram must be 'auto' or 'always'");
  }
  return options;
}

}  // namespace kvpool
