// Random calls of pools that share one space, beside a naive model.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <span>
#include <vector>

#include "fuzz_seeds.h"
#include "kvpool/pool/peer_claims.h"
#include "shared_space_kit.h"
#include "thrown.h"

using namespace kvpool;           // NOLINT(google-build-using-namespace)
using namespace kvpool::testing;  // NOLINT(google-build-using-namespace)

namespace {

struct Size {
  Size(std::uint32_t of_block, std::uint32_t into = 1) : units(of_block), pieces(into) {}  // NOLINT: 4 is a size, too
  std::uint32_t units;
  std::uint32_t pieces;  // into which a block may be cut
};

// One pool, and all that its application knows of it.
struct Tenant {
  std::shared_ptr<Pool> pool;
  std::uint32_t block_units;
  std::uint32_t pieces;
  std::map<Address, std::uint64_t> active;  // and the stamp of each
  std::vector<Addresses> lent;
  std::vector<Tokens> prompts;
  std::map<Tokens, std::uint64_t> content;  // by prompt: the stamp of its last page, when it was last inserted
  std::vector<Pins> pins;
};

// Random calls of several pools. After each, the owner of each unit is worked out anew from what the applications know
// and from what the pools explain, and all that the pools and the space count must agree with it.
class Game {
 public:
  Game(std::uint32_t hbm, std::uint32_t dram, const std::vector<Size>& sizes, std::uint64_t seed)
      : space_(hbm, dram, std::max(2U, static_cast<std::uint32_t>(sizes.size()))), random_(seed) {
    for (const Size& size : sizes) {
      tenants_.push_back(
          {space_.make_pool(size.units, true, size.pieces), size.units, size.pieces, {}, {}, {}, {}, {}});
    }
  }

  void step() {
    Tenant& tenant = tenants_[below(tenants_.size())];
    switch (below(12)) {
      case 0:
      case 1:
      case 2:
        return alloc(tenant);
      case 3:
        return free_some(tenant);
      case 4:
      case 5:
        return insert_some(tenant);
      case 6:
        return match_one(tenant);
      case 7:
        if (!tenant.pins.empty()) tenant.pins.erase(tenant.pins.begin() + static_cast<long>(below(tenant.pins.size())));
        return;
      case 8:
        tenant.pool->evict(below(6), below(2) == 0 ? MediumChoice(Medium::kDram) : kMixed);
        return;
      case 9:
        swap(tenant);
        return;
      case 10:
        return lend(tenant);
      default:
        return stale(tenant);
    }
  }

  void check() {
    MediumMap<std::vector<int>> owners;  // of each unit: how many blocks have it
    for (const Medium medium : kTiers) owners[medium].resize(space_.units[medium]);
    std::vector<MediumMap<std::uint32_t>> cached(tenants_.size());
    for (std::size_t i = 0; i < tenants_.size(); ++i) {
      Tenant& tenant = tenants_[i];
      const auto own = [&](Address address) {
        std::vector<std::int32_t> units(tenant.pieces);
        tenant.pool->block_table(&address, 1, units.data());
        REQUIRE(*std::min_element(units.begin(), units.end()) == static_cast<std::int32_t>(block_of(address)));
        for (const std::int32_t first : units) {
          for (std::uint32_t i = 0; i < tenant.block_units / tenant.pieces; ++i) {
            ++owners[medium_of(address)][static_cast<std::size_t>(first) + i];
          }
        }
      };
      for (const auto& [address, stamped] : tenant.active) {
        own(address);
        REQUIRE(is_stamped(tenant, address, stamped));
      }
      for (const Addresses& blocks : tenant.lent) std::for_each(blocks.begin(), blocks.end(), own);
      std::set<Address> seen;
      for (const Tokens& tokens : tenant.prompts) {
        const MatchExplanation found = tenant.pool->explain("", tokens.data(), tokens.size());
        for (std::size_t page = 0; page < found.matched_pages; ++page) {
          REQUIRE(is_stamped(tenant, found.addresses[page], tenant.content.at(first_pages(tokens, page + 1))));
          if (!seen.insert(found.addresses[page]).second) continue;
          own(found.addresses[page]);
          ++cached[i][medium_of(found.addresses[page])];
        }
      }
    }
    for (std::size_t i = 0; i < tenants_.size(); ++i) check_counts(tenants_[i], owners, cached[i]);
    for (const Medium medium : kTiers) check_units(medium);
  }

 private:
  std::size_t below(std::size_t n) { return random_() % n; }

  // Each piece of a block has its own stamp.
  void stamp(Tenant& tenant, Address address, std::uint64_t value) {
    std::uint64_t of_piece = value << 8;
    for (const std::span<std::byte> piece : space_.pieces_of(*tenant.pool, address, tenant.block_units)) {
      for (std::size_t at = 0; at < piece.size(); at += sizeof of_piece) {
        std::memcpy(piece.data() + at, &of_piece, sizeof of_piece);
      }
      ++of_piece;
    }
  }
  bool is_stamped(Tenant& tenant, Address address, std::uint64_t value) {
    std::uint64_t of_piece = value << 8;
    for (const std::span<std::byte> piece : space_.pieces_of(*tenant.pool, address, tenant.block_units)) {
      for (std::size_t at = 0; at < piece.size(); at += sizeof of_piece) {
        if (std::memcmp(piece.data() + at, &of_piece, sizeof of_piece) != 0) return false;
      }
      ++of_piece;
    }
    return true;
  }

  void take(Tenant& tenant, const Addresses& blocks) {
    for (const Address address : blocks) {
      REQUIRE(given_.insert(address).second);  // by whichever pool, ever
      const std::uint64_t value = ++stamp_;
      stamp(tenant, address, value);
      REQUIRE(tenant.active.emplace(address, value).second);
    }
  }

  void alloc(Tenant& tenant) {
    const std::size_t n = below(5);
    const std::array<MediumChoice, 3> choices{Medium::kHbm, Medium::kDram, kMixed};
    const MediumChoice medium = choices[below(3)];
    const bool evict = below(2) == 0;
    const PoolStats before = tenant.pool->stats();
    std::size_t possible = 0;
    for (const Medium tier : kTiers) {
      if (!medium.includes(tier)) continue;
      possible += before.media[tier].by_state[0] + (evict ? before.media[tier].evictable : 0);
    }
    Addresses blocks(n);
    if (!evict) {
      REQUIRE(tenant.pool->try_alloc(n, medium, blocks.data()) == (n <= possible));
    } else {
      const auto code = code_of([&] { tenant.pool->alloc_evicting(n, medium, blocks.data()); });
      REQUIRE(code == (n <= possible ? std::nullopt : std::optional(ErrorCode::kOutOfBlocks)));
    }
    if (n <= possible) take(tenant, blocks);
  }

  Addresses some_active(Tenant& tenant, std::size_t most) {
    Addresses all;
    for (const auto& [address, stamped] : tenant.active) all.push_back(address);
    std::shuffle(all.begin(), all.end(), random_);
    all.resize(std::min(all.size(), most));
    return all;
  }

  void free_some(Tenant& tenant) {
    const Addresses blocks = some_active(tenant, below(5));
    tenant.pool->free(blocks.data(), blocks.size());
    for (const Address address : blocks) tenant.active.erase(address);
  }

  void insert_some(Tenant& tenant) {
    const Addresses blocks = some_active(tenant, 1 + below(4));
    if (blocks.empty()) return;
    // A new one, or the beginning of an older one and then other tokens.
    Tokens tokens = prompt(static_cast<Token>(++prompts_), blocks.size());
    if (!tenant.prompts.empty() && below(2) == 0) {
      const Tokens& older = tenant.prompts[below(tenant.prompts.size())];
      const std::size_t shared = std::min(older.size() / kPage, below(blocks.size() + 1));
      std::copy_n(older.begin(), shared * kPage, tokens.begin());
    }
    const std::size_t cached = tenant.pool->explain("", tokens.data(), tokens.size()).matched_pages;
    Held held = insert(tenant.pool, tokens, blocks, "", /*free_duplicates=*/true);
    for (std::size_t page = 0; page < blocks.size(); ++page) {
      if (page >= cached) tenant.content[first_pages(tokens, page + 1)] = tenant.active.at(blocks[page]);
      tenant.active.erase(blocks[page]);
    }
    tenant.prompts.push_back(std::move(tokens));
    if (below(3) == 0) tenant.pins.push_back(std::move(held.pins));
  }

  static Tokens first_pages(const Tokens& tokens, std::size_t pages) {
    return {tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(pages * kPage)};
  }

  void match_one(Tenant& tenant) {
    if (tenant.prompts.empty()) return;
    Found found = match(tenant.pool, tenant.prompts[below(tenant.prompts.size())]);
    if (tenant.pins.size() < 3) tenant.pins.push_back(std::move(found.pins));
  }

  void swap(Tenant& tenant) {
    if (below(2) == 0 || tenant.prompts.empty()) {
      tenant.pool->swap_out(below(6));
      return;
    }
    // Nothing else may have pins: blocks in limbo are nobody's that this model knows.
    if (!tenant.pins.empty()) return;
    const Tokens& tokens = tenant.prompts[below(tenant.prompts.size())];
    const Addresses blocks = tenant.pool->explain("", tokens.data(), tokens.size()).addresses;
    Addresses now(blocks.size());
    const auto code = code_of([&] {
      const Pins pins(tenant.pool, tenant.pool->swap_in(blocks, {}, now.data()));
      for (std::size_t i = 0; i < now.size(); ++i) {
        REQUIRE(medium_of(now[i]) == Medium::kHbm);
        REQUIRE(is_stamped(tenant, now[i], tenant.content.at(first_pages(tokens, i + 1))));
      }
    });
    REQUIRE((!code || code == ErrorCode::kOutOfBlocks));
  }

  void lend(Tenant& tenant) {
    if (tenant.lent.size() > 2) {
      Addresses& blocks = tenant.lent[below(tenant.lent.size())];
      if (below(2) == 0) tenant.pool->for_peers().quarantine(blocks.data(), blocks.size());
      tenant.pool->for_peers().release(blocks.data(), blocks.size());
      std::swap(blocks, tenant.lent.back());
      tenant.lent.pop_back();
      return;
    }
    Addresses blocks(1 + below(2));
    const BlockState to = below(2) == 0 ? BlockState::kLent : BlockState::kReserved;
    if (!tenant.pool->for_peers().take(blocks.size(), kMixed, to, 77, 1, /*evict=*/false, blocks.data())) return;
    for (const Address address : blocks) REQUIRE(given_.insert(address).second);
    tenant.lent.push_back(std::move(blocks));
  }

  // An address that was given out some time is the pool's own active block, or nobody may free it.
  void stale(Tenant& tenant) {
    if (given_.empty()) return;
    auto at = given_.lower_bound(random_());
    if (at == given_.end()) at = given_.begin();
    if (tenant.active.contains(*at)) return;
    const auto code = code_of([&] { tenant.pool->free(&*at, 1); });
    REQUIRE((code == ErrorCode::kStaleAddress || code == ErrorCode::kState || code == ErrorCode::kArgument ||
             code == ErrorCode::kNotOwner));
  }

  void check_counts(Tenant& tenant, const MediumMap<std::vector<int>>& owners, const MediumMap<std::uint32_t>& cached) {
    const PoolStats stats = tenant.pool->audit();
    for (const Medium medium : kTiers) {
      const auto count = [&](BlockState state) {
        return stats.media[medium].by_state[static_cast<std::size_t>(state)];
      };
      const auto here = [&](Address address) { return medium_of(address) == medium; };
      std::uint32_t active = 0;
      for (const auto& [address, stamped] : tenant.active) active += here(address) ? 1 : 0;
      std::uint32_t lent = 0;
      for (const Addresses& blocks : tenant.lent) {
        lent += static_cast<std::uint32_t>(std::count_if(blocks.begin(), blocks.end(), here));
      }
      const std::uint32_t capacity = space_.units[medium] / tenant.block_units;
      const std::uint32_t free = runs_that_fit(owners[medium], tenant.block_units / tenant.pieces) / tenant.pieces;
      REQUIRE(stats.media[medium].capacity == capacity);
      REQUIRE(count(BlockState::kActive) == active);
      REQUIRE(count(BlockState::kHistorical) == cached[medium]);
      REQUIRE(count(BlockState::kLent) + count(BlockState::kReserved) == lent);
      REQUIRE(count(BlockState::kFree) == free);
      REQUIRE(stats.media[medium].displaced == capacity - active - cached[medium] - lent - free);
      REQUIRE(std::all_of(owners[medium].begin(), owners[medium].end(), [](int owner) { return owner <= 1; }));
    }
  }

  // In the free runs of units.
  static std::uint32_t runs_that_fit(const std::vector<int>& owners, std::uint32_t units) {
    std::uint32_t fit = 0;
    std::uint32_t run = 0;
    for (const int owner : owners) {
      run = owner == 0 ? run + 1 : 0;
      if (run < units) continue;
      ++fit;
      run = 0;
    }
    return fit;
  }

  void check_units(Medium medium) {
    const UnitCounts counts = space_.counts(medium);
    std::uint32_t sum = 0;
    for (int code = 0; code < kBlockStateCount; ++code) {
      const auto state = static_cast<BlockState>(code);
      sum += counts.by_state[static_cast<std::size_t>(code)];
      if (state == BlockState::kFree) continue;
      std::uint32_t units = 0;
      for (Tenant& tenant : tenants_) units += tenant.block_units * in_state(*tenant.pool, state, medium);
      REQUIRE(counts.by_state[static_cast<std::size_t>(code)] == units);
    }
    REQUIRE(sum == counts.capacity);
    REQUIRE(counts.capacity == space_.units[medium]);
  }

  Space space_;
  std::mt19937_64 random_;
  std::vector<Tenant> tenants_;
  std::set<Address> given_;
  std::uint64_t stamp_ = 0;
  std::uint64_t prompts_ = 0;
};

void play(std::uint32_t hbm, std::uint32_t dram, const std::vector<Size>& sizes, int events) {
  for (const std::uint64_t seed : fuzz_seeds()) {
    CAPTURE(seed);
    Game game(hbm, dram, sizes, seed);
    const int more = std::getenv("KVPOOL_LONG") != nullptr ? 20 : 1;
    for (int event = 0; event < events * more; ++event) {
      CAPTURE(event);
      game.step();
      game.check();
    }
  }
}

}  // namespace

TEST_CASE("pools of 3 and 4 units a block on one space agree with a naive model after every event") {
  play(40, 30, {3, 4}, 700);
}

TEST_CASE("pools of other sizes on one space agree with a naive model after every event") {
  play(37, 24, {1, 5}, 250);
  play(64, 20, {2, 2}, 250);
  play(60, 60, {7, 3, 4}, 250);
  play(20, 20, {6}, 150);  // a space that has only one, and could have more
}

TEST_CASE(
    "pools whose blocks may lie in pieces agree with a naive model after every event, and so does their content") {
  play(40, 30, {{6, 3}, 4}, 500);
  play(37, 24, {{4, 4}, {6, 2}, 5}, 300);
  play(31, 31, {{8, 2}, 3, 1}, 300);
}
