// The block store beside a naive model: a vector of states and generations, and a set of free blocks.
#include "kvpool/blocks/block_store.h"

#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kvpool/base/error.h"
#include "one_thread.h"

namespace {

KVPOOL_ONE_THREAD;

using kvpool::Address;
using kvpool::AddressFault;
using kvpool::block_of;
using kvpool::BlockState;
using kvpool::BlockStore;
using kvpool::Error;
using kvpool::ErrorCode;
using kvpool::generation_of;
using kvpool::instance_of;
using kvpool::is_owned;
using kvpool::kBlocksMax;
using kvpool::kBlockStateCount;
using kvpool::kGenerationMax;
using kvpool::kInstanceMax;
using kvpool::make_address;
using kvpool::Medium;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

std::vector<Address> take(BlockStore& store, std::uint32_t n, BlockState to = BlockState::kActive) {
  std::vector<Address> out(n);
  REQUIRE(store.take(n, to, out.data()));
  return out;
}

std::uint32_t pieces_of(const std::vector<Address>& addresses) {
  std::uint32_t pieces = addresses.empty() ? 0 : 1;
  for (std::size_t i = 1; i < addresses.size(); ++i) {
    pieces += block_of(addresses[i]) == block_of(addresses[i - 1]) + 1 ? 0 : 1;
  }
  return pieces;
}

void release(BlockStore& store, const std::vector<Address>& addresses) {
  for (std::size_t i = 0; i < addresses.size();) {
    const std::uint32_t first = block_of(addresses[i]);
    std::uint32_t n = 1;
    while (i + n < addresses.size() && block_of(addresses[i + n]) == first + n) ++n;
    store.release(first, n);
    i += n;
  }
}

// What a store must do, written down without regard to cost.
struct Model {
  explicit Model(std::uint32_t blocks) : states(blocks, BlockState::kFree), generations(blocks, 1), tags(blocks, 0) {
    for (std::uint32_t block = 0; block < blocks; ++block) free.insert(block);
  }

  std::multiset<std::uint32_t> run_lengths() const {
    std::multiset<std::uint32_t> lengths;
    std::uint32_t length = 0;
    for (auto it = free.begin(); it != free.end(); ++it) {
      ++length;
      if (std::next(it) == free.end() || *std::next(it) != *it + 1) {
        lengths.insert(length);
        length = 0;
      }
    }
    return lengths;
  }
  // The pieces that a request for n must be answered with.
  std::vector<std::uint32_t> expected_pieces(std::uint32_t n) const {
    std::multiset<std::uint32_t> lengths = run_lengths();
    std::vector<std::uint32_t> pieces;
    while (n > 0 && lengths.lower_bound(n) == lengths.end()) {
      const auto longest = std::prev(lengths.end());
      pieces.push_back(*longest);
      n -= *longest;
      lengths.erase(longest);
    }
    if (n > 0) pieces.push_back(n);
    return pieces;
  }
  void take(std::uint32_t block, BlockState to) {
    states[block] = to;
    tags[block] = 0;
    free.erase(block);
  }
  void release(std::uint32_t block) {
    if (generations[block]++ == kGenerationMax) {
      states[block] = BlockState::kRetired;
    } else {
      states[block] = BlockState::kFree;
      free.insert(block);
    }
  }
  // What differs, or nothing.
  std::string difference(const BlockStore& store) const {
    std::array<std::uint32_t, kBlockStateCount> counts{};
    for (std::uint32_t block = 0; block < states.size(); ++block) {
      const std::string where = " of block " + std::to_string(block);
      ++counts[static_cast<std::size_t>(states[block])];
      if (store.state(block) != states[block]) return "state" + where;
      if (store.generation(block) != generations[block]) return "generation" + where;
      const bool retired = states[block] == BlockState::kRetired;
      if (store.find(store.address_of(block)) != (retired ? AddressFault::kStale : AddressFault::kNone)) {
        return "address" + where;
      }
      if (!is_owned(states[block])) continue;
      if (store.tag(block) != tags[block]) return "tag" + where;
      if (store.mark(block) != static_cast<std::uint32_t>(tags[block] >> 7)) return "mark" + where;
    }
    for (int state = 0; state < kBlockStateCount; ++state) {
      if (store.count(static_cast<BlockState>(state)) != counts[static_cast<std::size_t>(state)]) {
        return std::string("count of ") + block_state_name(static_cast<BlockState>(state));
      }
    }
    const std::multiset<std::uint32_t> lengths = run_lengths();
    if (store.free_runs().runs != lengths.size()) return "number of runs";
    if (store.free_runs().longest != (lengths.empty() ? 0 : *lengths.rbegin())) return "longest run";
    return "";
  }

  std::vector<BlockState> states;
  std::vector<std::uint32_t> generations;
  std::vector<std::uint64_t> tags;
  std::set<std::uint32_t> free;
};

std::vector<std::uint64_t> seeds() {
  if (const char* given = std::getenv("KVPOOL_SEED")) return {std::strtoull(given, nullptr, 0)};
  return {1, 2, 3, std::random_device{}()};
}

void fuzz(std::uint32_t blocks, std::uint32_t length_max, int events, std::uint64_t seed) {
  std::fprintf(stderr, "block store fuzz: %u blocks, KVPOOL_SEED=%llu\n", blocks,
               static_cast<unsigned long long>(seed));
  CAPTURE(seed);
  CAPTURE(blocks);
  std::mt19937_64 random(seed);
  const auto below = [&random](std::uint32_t n) { return static_cast<std::uint32_t>(random() % n); };
  const auto owned_state = [&below] { return static_cast<BlockState>(1 + below(5)); };
  BlockStore store(Medium::kHbm, blocks);
  Model model(blocks);
  std::vector<Address> stale;
  for (int event = 0; event < events; ++event) {
    CAPTURE(event);
    const std::uint32_t block = below(blocks);
    const BlockState state = model.states[block];
    const bool owned = is_owned(state);
    switch (below(10)) {
      case 0:
      case 1:
      case 2: {
        const std::uint32_t n = below(below(12) == 0 ? blocks + 2 : length_max + 1);
        const BlockState to = owned_state();
        std::vector<Address> out(n + 1, 0);
        const bool taken = store.take(n, to, out.data());
        REQUIRE(out[n] == 0);
        REQUIRE(taken == (n <= model.free.size()));
        if (!taken) break;
        std::uint32_t at = 0;
        for (const std::uint32_t piece : model.expected_pieces(n)) {
          for (std::uint32_t i = 0; i < piece; ++i, ++at) {
            const std::uint32_t got = block_of(out[at]);
            REQUIRE(model.free.contains(got));
            if (i > 0) REQUIRE(got == block_of(out[at - 1]) + 1);
            REQUIRE(out[at] == make_address(0, Medium::kHbm, model.generations[got], got));
            model.take(got, to);
          }
        }
        break;
      }
      case 3: {
        Address address = 0;
        const BlockState to = owned_state();
        REQUIRE(store.take_block(block, to, &address) == (state == BlockState::kFree));
        if (state != BlockState::kFree) break;
        REQUIRE(address == store.address_of(block));
        model.take(block, to);
        break;
      }
      case 4:
        if (owned) {
          const BlockState to = owned_state();
          store.set_state(block, to);
          model.states[block] = to;
        }
        break;
      case 5:
        if (owned) {
          model.tags[block] = random();
          store.set_tag(block, model.tags[block]);
          store.set_mark(block, static_cast<std::uint32_t>(model.tags[block] >> 7));
        } else if (state == BlockState::kFree && below(8) == 0) {
          model.generations[block] = std::max(model.generations[block], kGenerationMax - below(3));
          store.set_generation_for_test(block, model.generations[block]);
        }
        break;
      case 6: {
        std::uint32_t n = 0;
        const std::uint32_t most = 1 + below(length_max);
        while (n < most && block + n < blocks &&
               (model.states[block + n] == BlockState::kFree || model.states[block + n] == BlockState::kOverlapped)) {
          model.take(block + n, BlockState::kOverlapped);
          ++n;
        }
        store.overlap(block, n);
        break;
      }
      case 7: {
        std::uint32_t n = 0;
        const std::uint32_t most = 1 + below(length_max);
        while (n < most && block + n < blocks && model.states[block + n] == BlockState::kOverlapped) {
          model.states[block + n] = BlockState::kFree;
          model.free.insert(block + n);
          ++n;
        }
        if (n > 0) store.end_overlap(block, n);
        break;
      }
      default: {
        // As many neighbours as nobody else has freed, in whatever states they are.
        std::uint32_t n = 0;
        const std::uint32_t most = 1 + below(length_max);
        while (n < most && block + n < blocks && is_owned(model.states[block + n])) {
          stale.push_back(store.address_of(block + n));
          ++n;
        }
        store.release(block, n);
        for (std::uint32_t i = 0; i < n; ++i) model.release(block + i);
      }
    }
    REQUIRE(model.difference(store) == "");
    REQUIRE_NOTHROW(store.audit());
  }
  std::size_t revived = 0;
  for (const Address address : stale) revived += store.find(address) == AddressFault::kStale ? 0 : 1;
  // set_generation_for_test only raises generations, so that no address can come back.
  CHECK(revived == 0);
}

}  // namespace

TEST_CASE("a new store is free, with generation 1, in one run") {
  BlockStore store(Medium::kDram, 100);
  CHECK(store.medium() == Medium::kDram);
  CHECK(store.capacity() == 100);
  CHECK(store.free_count() == 100);
  CHECK(store.count(BlockState::kActive) == 0);
  CHECK(store.free_runs().runs == 1);
  CHECK(store.free_runs().longest == 100);
  CHECK(store.generation(0) == 1);
  CHECK(store.generation(99) == 1);
  CHECK(store.instance() == 0);
  const std::vector<Address> all = take(store, 100);
  for (std::uint32_t block = 0; block < 100; ++block) {
    CHECK(all[block] == make_address(0, Medium::kDram, 1, block));
  }
  store.audit();
}

TEST_CASE("a store without blocks gives none and finds none") {
  BlockStore store(Medium::kHbm, 0);
  Address out = 7;
  CHECK(store.take(0, BlockState::kActive, &out));
  CHECK_FALSE(store.take(1, BlockState::kActive, &out));
  CHECK_FALSE(store.take_block(0, BlockState::kActive, &out));
  CHECK(out == 7);
  CHECK(store.find(make_address(0, Medium::kHbm, 1, 0)) == AddressFault::kOutOfRange);
  CHECK(store.free_runs().runs == 0);
  CHECK(store.free_runs().longest == 0);
  store.release(0, 0);
  store.audit();
}

TEST_CASE("a store of one block gives it again and again under new addresses") {
  BlockStore store(Medium::kHbm, 1);
  std::set<Address> seen;
  for (int i = 0; i < 100; ++i) {
    const Address address = take(store, 1)[0];
    CHECK(seen.insert(address).second);
    CHECK(store.find(address) == AddressFault::kNone);
    store.release(0, 1);
    CHECK(store.find(address) == AddressFault::kStale);
  }
  store.audit();
}

TEST_CASE("sixteen million blocks cost nothing until they are used") {
  const auto resident_bytes = [] {
    std::uint64_t pages_total = 0;
    std::uint64_t pages_resident = 0;
    std::ifstream("/proc/self/statm") >> pages_total >> pages_resident;
    return pages_resident * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  };
  const std::uint64_t before = resident_bytes();
  BlockStore store(Medium::kDram, kBlocksMax);
  CHECK(store.metadata_bytes() < 16ULL * kBlocksMax + 65536);
  const std::vector<Address> some = take(store, 256);
  CHECK(pieces_of(some) == 1);
  Address last = 0;
  REQUIRE(store.take_block(kBlocksMax - 1, BlockState::kActive, &last));
  CHECK(block_of(last) == kBlocksMax - 1);
  CHECK(store.find(last) == AddressFault::kNone);
  CHECK(store.free_runs().longest == kBlocksMax - 257);
  if (!kSanitized) CHECK(resident_bytes() - before < 32ULL << 20);  // of 256 MiB; a page may be a huge one
  Address middle = 0;
  REQUIRE(store.take_block(kBlocksMax / 2 + 5, BlockState::kActive, &middle));
  CHECK(store.free_runs().runs == 2);
  store.release(kBlocksMax / 2 + 5, 1);
  store.release(kBlocksMax - 1, 1);
  store.release(0, 256);
  CHECK(store.free_runs().runs == 1);
  CHECK(store.free_runs().longest == kBlocksMax);
  store.audit();
}

TEST_CASE("taking more than is free changes nothing") {
  BlockStore store(Medium::kHbm, 64);
  const std::vector<Address> held = take(store, 60);
  store.release(10, 3);
  std::vector<Address> out(65, 99);
  for (const std::uint32_t n : {8U, 64U, 65U, 0xffffffffU}) {
    CHECK_FALSE(store.take(n, BlockState::kActive, out.data()));
  }
  CHECK(std::all_of(out.begin(), out.end(), [](Address address) { return address == 99; }));
  CHECK(store.free_count() == 7);
  CHECK(store.count(BlockState::kActive) == 57);
  CHECK(store.free_runs().runs == 2);
  store.audit();
  CHECK(take(store, 7).size() == 7);
  CHECK(store.free_count() == 0);
  store.audit();
}

TEST_CASE("a request is one run when one is long enough, and else as few as can be") {
  BlockStore store(Medium::kHbm, 1000);
  take(store, 1000);
  store.release(100, 10);
  store.release(200, 40);
  store.release(300, 25);
  store.release(400, 1);
  CHECK(block_of(take(store, 1)[0]) == 400);   // a hole, not a piece of a run
  CHECK(block_of(take(store, 25)[0]) == 300);  // the one that fits
  store.release(300, 25);
  store.release(400, 1);
  const std::vector<Address> mixed = take(store, 70);
  CHECK(pieces_of(mixed) == 3);
  CHECK(block_of(mixed[0]) == 200);   // 40, the longest
  CHECK(block_of(mixed[40]) == 300);  // 25, the next
  CHECK(block_of(mixed[65]) == 100);  // and 5 of 10
  CHECK(store.free_runs().runs == 2);
  store.audit();
}

TEST_CASE("an exact block is given when it is free, and only then") {
  BlockStore store(Medium::kHbm, 32);
  Address out = 0;
  REQUIRE(store.take_block(7, BlockState::kLent, &out));
  CHECK(out == make_address(0, Medium::kHbm, 1, 7));
  CHECK(store.state(7) == BlockState::kLent);
  CHECK_FALSE(store.take_block(7, BlockState::kActive, &out));
  CHECK_FALSE(store.take_block(32, BlockState::kActive, &out));
  CHECK_FALSE(store.take_block(0xffffffffU, BlockState::kActive, &out));
  CHECK(store.free_runs().runs == 2);
  store.release(7, 1);
  CHECK(store.free_runs().runs == 1);
  store.audit();
}

TEST_CASE("each kind of bad address has its own fault") {
  BlockStore store(Medium::kHbm, 100);
  store.set_instance(kInstanceMax);
  CHECK(store.instance() == kInstanceMax);
  const Address address = take(store, 1)[0];
  const std::uint32_t block = block_of(address);
  CHECK(instance_of(address) == kInstanceMax);
  CHECK(store.find(address) == AddressFault::kNone);
  CHECK(store.find(make_address(0, Medium::kHbm, 1, block)) == AddressFault::kNone);  // from before the pool joined
  CHECK(store.find(make_address(5, Medium::kHbm, 1, block)) == AddressFault::kForeign);
  CHECK(store.find(make_address(0, Medium::kDram, 1, block)) == AddressFault::kNoMedium);
  CHECK(store.find(make_address(0, Medium::kDisk, 1, block)) == AddressFault::kNoMedium);
  CHECK(store.find(make_address(0, static_cast<Medium>(4), 1, block)) == AddressFault::kNoMedium);
  CHECK(store.find(make_address(0, static_cast<Medium>(0), 1, block)) == AddressFault::kNoMedium);
  CHECK(store.find(0) == AddressFault::kNoMedium);
  CHECK(store.find(~Address{0}) == AddressFault::kNoMedium);
  CHECK(store.find(make_address(0, Medium::kHbm, 1, 100)) == AddressFault::kOutOfRange);
  CHECK(store.find(make_address(0, Medium::kHbm, 1, kBlocksMax - 1)) == AddressFault::kOutOfRange);
  CHECK(store.find(make_address(0, Medium::kHbm, 0, block)) == AddressFault::kStale);
  CHECK(store.find(make_address(0, Medium::kHbm, 2, block)) == AddressFault::kStale);
  CHECK(store.find(make_address(0, Medium::kHbm, kGenerationMax, block)) == AddressFault::kStale);

  const BlockStore local(Medium::kDram, 100);
  CHECK(local.find(make_address(1, Medium::kDram, 1, 0)) == AddressFault::kForeign);
  CHECK(local.find(make_address(0, Medium::kDram, 1, 0)) == AddressFault::kNone);
}

TEST_CASE("an address is stale as soon as its block is released, and stays so when the block is given again") {
  BlockStore store(Medium::kDram, 8);
  const std::vector<Address> old = take(store, 8);
  store.release(2, 4);
  for (std::uint32_t i = 0; i < 8; ++i) {
    CHECK(store.find(old[i]) == (i >= 2 && i < 6 ? AddressFault::kStale : AddressFault::kNone));
  }
  const std::vector<Address> fresh = take(store, 4);
  for (const Address address : fresh) {
    CHECK(store.find(address) == AddressFault::kNone);
    CHECK(generation_of(address) == 2);
    CHECK(store.find(old[block_of(address)]) == AddressFault::kStale);
  }
}

TEST_CASE("tag and mark are zero when a block is given and the owner's until it is released") {
  BlockStore store(Medium::kHbm, 4);
  for (int round = 0; round < 3; ++round) {
    for (const Address address : take(store, 4)) {
      const std::uint32_t block = block_of(address);
      CHECK(store.tag(block) == 0);
      CHECK(store.mark(block) == 0);
      store.set_tag(block, ~std::uint64_t{0} - block);
      store.set_mark(block, 0x80000000U | block);
      store.set_state(block, BlockState::kHistorical);
      CHECK(store.tag(block) == ~std::uint64_t{0} - block);
      CHECK(store.mark(block) == (0x80000000U | block));
    }
    store.release(1, 2);
    store.release(3, 1);
    store.release(0, 1);
    store.audit();
  }
}

TEST_CASE("states are counted through every change, and a range of mixed states is released at once") {
  BlockStore store(Medium::kHbm, 10);
  take(store, 10, BlockState::kReserved);
  CHECK(store.count(BlockState::kReserved) == 10);
  store.set_state(3, BlockState::kHistorical);
  store.set_state(4, BlockState::kQuarantined);
  store.set_state(5, BlockState::kActive);
  store.set_state(5, BlockState::kLent);
  CHECK(store.count(BlockState::kReserved) == 7);
  CHECK(store.count(BlockState::kActive) == 0);
  store.audit();
  store.release(0, 10);
  CHECK(store.free_count() == 10);
  CHECK(store.count(BlockState::kReserved) == 0);
  CHECK(store.count(BlockState::kLent) == 0);
  CHECK(store.free_runs().runs == 1);
  store.audit();
}

TEST_CASE("stores that start at different generations take each other's addresses for stale") {
  BlockStore early(Medium::kHbm, 4, 100);
  BlockStore late(Medium::kHbm, 4, kGenerationMax - 1);
  Address a = 0;
  Address b = 0;
  REQUIRE(early.take(1, BlockState::kActive, &a));
  REQUIRE(late.take(1, BlockState::kActive, &b));
  CHECK(generation_of(a) == 100);
  CHECK(early.address_of(0) == a);
  CHECK(early.find(b) == AddressFault::kStale);
  CHECK(late.find(a) == AddressFault::kStale);
  CHECK(late.find(b) == AddressFault::kNone);
  late.release(0, 1);
  REQUIRE(late.take_block(0, BlockState::kActive, &b));
  CHECK(generation_of(b) == kGenerationMax);
  late.release(0, 1);  // its last
  CHECK(late.count(BlockState::kRetired) == 1);
  CHECK(late.address_of(0) != b);
  late.audit();
}

TEST_CASE("a block whose generations are used up is retired and never comes back") {
  BlockStore store(Medium::kHbm, 8);
  store.set_generation_for_test(5, kGenerationMax);
  const std::vector<Address> all = take(store, 8);
  CHECK(generation_of(all[5]) == kGenerationMax);
  CHECK(block_of(all[5]) == 5);
  CHECK(store.find(all[5]) == AddressFault::kNone);
  store.release(0, 8);  // it is retired from the middle of a range
  CHECK(store.state(5) == BlockState::kRetired);
  CHECK(store.count(BlockState::kRetired) == 1);
  CHECK(store.free_count() == 7);
  CHECK(store.free_runs().runs == 2);
  CHECK(store.free_runs().longest == 5);
  CHECK(store.find(all[5]) == AddressFault::kStale);
  CHECK(store.find(store.address_of(5)) == AddressFault::kStale);
  for (const std::uint32_t generation : {0U, 1U, kGenerationMax}) {
    CHECK(store.find(make_address(0, Medium::kHbm, generation, 5)) == AddressFault::kStale);
  }
  Address out = 0;
  CHECK_FALSE(store.take_block(5, BlockState::kActive, &out));
  std::vector<Address> rest(8);
  CHECK_FALSE(store.take(8, BlockState::kActive, rest.data()));
  for (const Address address : take(store, 7)) CHECK(block_of(address) != 5);
  store.audit();
}

TEST_CASE("blocks retire at either end of a range, side by side, and all of it") {
  const std::vector<std::set<std::uint32_t>> cases = {{0}, {7}, {0, 7}, {3, 4}, {0, 1, 2, 3, 4, 5, 6, 7}, {1, 3, 5}};
  for (const std::set<std::uint32_t>& retiring : cases) {
    BlockStore store(Medium::kDram, 8);
    for (const std::uint32_t block : retiring) store.set_generation_for_test(block, kGenerationMax);
    take(store, 8);
    store.set_state(2, BlockState::kHistorical);
    store.set_state(4, BlockState::kLent);
    store.release(0, 8);
    CHECK(store.count(BlockState::kRetired) == retiring.size());
    CHECK(store.free_count() == 8 - retiring.size());
    for (std::uint32_t block = 0; block < 8; ++block) {
      CHECK((store.state(block) == BlockState::kRetired) == retiring.contains(block));
    }
    store.audit();
  }
}

TEST_CASE("runs survive a churn of mixed sizes at ninety per cent") {
  // The mean request is 77 blocks, which no allocator can exceed. A free list or queue falls to runs of about 1.
  std::mt19937 random(42);
  constexpr std::uint32_t kBlocks = 16384;
  BlockStore store(Medium::kHbm, kBlocks);
  std::vector<std::vector<Address>> held;
  std::uint64_t blocks = 0;
  std::uint64_t pieces = 0;
  for (int event = 0; event < 100000; ++event) {
    const std::uint32_t n = random() % 5 == 0 ? 256 : 1 + random() % 64;
    while (store.capacity() - store.free_count() + n > kBlocks / 10 * 9) {
      std::swap(held[random() % held.size()], held.back());
      release(store, held.back());
      held.pop_back();
    }
    const std::uint32_t longest = store.free_runs().longest;
    held.push_back(take(store, n));
    const std::uint32_t got = pieces_of(held.back());
    REQUIRE((got == 1) == (longest >= n));
    blocks += n;
    pieces += got;
  }
  store.audit();
  CHECK(blocks / pieces > 70);
}

TEST_CASE("the block store agrees with a naive model after every event") {
  const int more = std::getenv("KVPOOL_LONG") != nullptr ? 20 : 1;
  for (const std::uint64_t seed : seeds()) {
    fuzz(1, 2, 300 * more, seed);
    fuzz(12, 4, 3000 * more, seed);
    fuzz(200, 40, 3000 * more, seed);
    fuzz(5000, 700, 300 * more, seed);
  }
}

TEST_CASE("a store retires its blocks after the last of its generations") {
  BlockStore store(Medium::kDram, 2, 5, 7);
  for (std::uint32_t generation = 5; generation <= 7; ++generation) {
    Address address = 0;
    REQUIRE(store.take_block(0, BlockState::kActive, &address));
    CHECK(address == make_address(0, Medium::kDram, generation, 0));
    CHECK(store.find(address) == AddressFault::kNone);
    store.release(0, 1);
    CHECK(store.find(address) == AddressFault::kStale);
  }
  CHECK(store.state(0) == BlockState::kRetired);
  CHECK(store.free_count() == 1);
  Address address = 0;
  CHECK_FALSE(store.take_block(0, BlockState::kActive, &address));
  store.audit();
}

TEST_CASE("an overlapped block cannot be taken, and comes back with the same generation") {
  BlockStore store(Medium::kHbm, 8, 3);
  std::vector<Address> out(8);
  store.overlap(2, 3);
  CHECK(store.count(BlockState::kOverlapped) == 3);
  CHECK(store.free_runs().runs == 2);
  CHECK_FALSE(store.take(6, BlockState::kActive, out.data()));
  CHECK_FALSE(store.take_block(3, BlockState::kActive, out.data()));
  REQUIRE(store.take(5, BlockState::kActive, out.data()));
  for (int i = 0; i < 5; ++i) CHECK((block_of(out[i]) < 2 || block_of(out[i]) > 4));
  store.end_overlap(2, 3);
  CHECK(store.free_count() == 3);
  REQUIRE(store.take_block(3, BlockState::kActive, out.data()));
  CHECK(generation_of(out[0]) == 3);
  store.audit();
}

TEST_CASE("names of states are words") {
  CHECK(std::string(block_state_name(BlockState::kFree)) == "free");
  CHECK(std::string(block_state_name(BlockState::kQuarantined)) == "quarantined");
  CHECK(std::string(block_state_name(BlockState::kRetired)) == "retired");
  CHECK(std::string(block_state_name(BlockState::kOverlapped)) == "overlapped");
  CHECK(std::string(block_state_name(static_cast<BlockState>(99))) == "unknown");
}

#ifndef KVPOOL_DEBUG
// With costly checks on, the misuse itself aborts.
TEST_CASE("the audit notices blocks that changed hands behind the store's back") {
  const auto broken = [](const BlockStore& store) {
    try {
      store.audit();
    } catch (const Error& error) {
      return error.code() == ErrorCode::kAudit;
    }
    return false;
  };
  BlockStore store(Medium::kHbm, 16);
  take(store, 8);
  CHECK_FALSE(broken(store));
  store.set_state(3, BlockState::kFree);
  CHECK(broken(store));
  store.set_state(3, BlockState::kRetired);
  CHECK(broken(store));
  store.set_state(3, BlockState::kActive);
  CHECK_FALSE(broken(store));
  store.set_mark(8, 7);
  CHECK(broken(store));
  store.set_mark(8, 8);
  CHECK_FALSE(broken(store));
  store.set_tag(15, 1);
  CHECK(broken(store));
}
#endif
