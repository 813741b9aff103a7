// HBM that the engine takes back for a while: which blocks keep it, and what an audit sees.
#include <doctest/doctest.h>

#include <array>

#include "kvpool/base/error.h"
#include "kvpool/blocks/cache_blocks.h"

namespace kvpool {
namespace {

struct Closed {
  explicit Closed(std::uint32_t caches = 1) : space({4, 4, 0}, caches), blocks(space, {}) {}
  BlockSpace space;
  CacheBlocks blocks;
};

ErrorCode code_of_close(CacheBlocks& blocks) {
  try {
    blocks.close_hbm();
  } catch (const Error& error) {
    return error.code();
  }
  return ErrorCode::kAudit;
}

TEST_CASE("closed HBM gives no block, MIXED takes DRAM, and what is taken becomes less") {
  Closed closed;
  CacheBlocks& blocks = closed.blocks;
  std::array<Address, 4> out{};
  REQUIRE(blocks.take(2, Medium::kHbm, BlockState::kActive, out.data()));
  blocks.close_hbm();
  CHECK_FALSE(blocks.take(1, Medium::kHbm, BlockState::kActive, &out[2]));
  CHECK_FALSE(blocks.take_block(Medium::kHbm, 3, BlockState::kActive, &out[2]));
  REQUIRE(blocks.take(2, kMixed, BlockState::kActive, &out[2]));
  CHECK(medium_of(out[2]) == Medium::kDram);
  CHECK(blocks.hbm_use(0).active == 2);
  CHECK_THROWS_WITH_AS(blocks.check_open(Medium::kHbm), "HBM of this pool is being suspended, and gives no more blocks",
                       Error);
  CHECK_NOTHROW(blocks.check_open(kMixed));
  CHECK_NOTHROW(blocks.check_open(Medium::kDram));
  blocks.release(out.data(), 2);
  CHECK_FALSE(blocks.hbm_use(0).any());
  blocks.suspend_hbm();
  blocks.audit();
  CHECK(blocks.store(Medium::kHbm).count(BlockState::kSuspended) == 4);
  CHECK(code_of_close(blocks) == ErrorCode::kSuspended);
  blocks.resume_hbm();
  blocks.audit();
  CHECK(blocks.take(4, Medium::kHbm, BlockState::kActive, out.data()));
}

TEST_CASE("every state but free keeps HBM, and so does a freed block that is still read") {
  Closed closed;
  CacheBlocks& blocks = closed.blocks;
  std::array<Address, 4> out{};
  REQUIRE(blocks.take(1, Medium::kHbm, BlockState::kReserved, &out[0]));
  REQUIRE(blocks.take(1, Medium::kHbm, BlockState::kLent, &out[1]));
  REQUIRE(blocks.take(1, Medium::kHbm, BlockState::kActive, &out[2]));
  REQUIRE(blocks.take(1, Medium::kHbm, BlockState::kHistorical, &out[3]));
  blocks.hold_for_reading(&out[2], 1, 0);
  blocks.release(&out[2], 1);
  HbmUse use = blocks.hbm_use(1);
  CHECK(use.reserved == 2);  // one of them waits for its reader
  CHECK(use.lent == 1);
  CHECK(use.read == 1);
  CHECK(use.pinned == 0);
  CHECK(blocks.hbm_use(0).pinned == 1);
  blocks.set_state(out[0], BlockState::kQuarantined);
  use = blocks.hbm_use(1);
  CHECK(use.quarantined == 1);
  CHECK(use.reserved == 1);
}

TEST_CASE("HBM that caches share, and HBM that is not there, cannot be closed") {
  Closed shared(2);
  CHECK(code_of_close(shared.blocks) == ErrorCode::kUnsupported);
  BlockSpace space({0, 4, 0});
  CacheBlocks none(space, {});
  CHECK(code_of_close(none) == ErrorCode::kState);
}

}  // namespace
}  // namespace kvpool
