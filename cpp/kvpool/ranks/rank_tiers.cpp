#include "kvpool/ranks/rank_tiers.h"

#include <algorithm>

#include "kvpool/base/error.h"
#include "kvpool/base/strips.h"
#include "kvpool/blocks/block_copy.h"
#include "kvpool/cuda/copier.h"

namespace kvpool {
namespace {

std::unique_ptr<DeviceMover> make_mover(const LocalMemory& memory) {
  const Arena& hbm = *memory.arena(Medium::kHbm);
  if (!hbm.on_device() || hbm.blocks() == 0) return nullptr;
  return DeviceMover::make(hbm, *memory.arena(Medium::kDram));
}

}  // namespace

RankTiers::RankTiers(const LocalMemory& memory, Executor& executor, int threads)
    : copiers_(executor, threads), mover_(make_mover(memory)) {}

void RankTiers::copy(const LocalMemory& memory, const CopyBody& body) {
  if (body.from.empty()) return;
  const MediaSpans spans = memory.spans();
  const std::uint32_t source = medium_bits_of(body.from.front());
  const std::uint32_t target = medium_bits_of(body.to.front());
  const bool one_way = std::ranges::all_of(body.from, [&](Address a) { return medium_bits_of(a) == source; }) &&
                       std::ranges::all_of(body.to, [&](Address a) { return medium_bits_of(a) == target; });
  if (!one_way || source == target || !blocks_exist(body.from, spans) || !blocks_exist(body.to, spans)) {
    throw Error(ErrorCode::kArgument, "blocks to copy that do not exist, or that do not go from one medium to another");
  }
  if (mover_ != nullptr) {
    const TierWay way = static_cast<Medium>(source) == Medium::kHbm ? TierWay::kOut : TierWay::kIn;
    return mover_->move(way, body.from.data(), body.to.data(), body.from.size(), std::nullopt);
  }
  const BlockCopier copier(*memory.arena(static_cast<Medium>(source)), *memory.arena(static_cast<Medium>(target)));
  copier.run(copiers_.team(), body.from.data(), body.to.data(), body.from.size());
}

}  // namespace kvpool
