// The content of one peer that this process is placing, or that a route receiver has promised to place: which transfer
// it belongs to, and in which blocks it is written.
//
// The blocks are this pool's. Their addresses may be from before it had an instance id, or from after: the same block
// is found by both.
//
// Each placement has a number that is never used again. Ids of transfers are the peer's to give, and one that it uses
// twice must not end the placement of another transfer.
//
// Thread-safety: none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "kvpool/base/address.h"

namespace kvpool {

class Placements {
 public:
  struct Ended {
    std::uint64_t transfer = 0;
    std::uint64_t content = 0;
    bool in_blocks = false;  // begin() was given blocks
  };

  // Returns the number of the placement. `content`: which content of the transfer it is counted for. `blocks`: those
  // for which is_placed_now() asks. Throws std::bad_alloc; then nothing has changed.
  std::uint64_t begin(std::uint64_t transfer, std::uint64_t content, std::vector<Address> blocks);
  // nullopt: there is no placement with this number (any more).
  std::optional<Ended> end(std::uint64_t number) noexcept;
  // Whether content is being placed in one of the blocks. Costs one look-up for each.
  bool is_placed_now(std::span<const Address> blocks) const noexcept;

 private:
  struct UnderWay {
    std::uint64_t number;
    std::uint64_t transfer;
    std::uint64_t content;
    std::vector<Address> blocks;
  };

  void forget(std::span<const Address> blocks) noexcept;

  std::vector<UnderWay> under_way_;                       // few: one of the link, and the passes of a route receiver
  std::unordered_map<Address, std::uint32_t> placed_in_;  // how many of them write the block
  std::uint64_t last_ = 0;
};

}  // namespace kvpool
