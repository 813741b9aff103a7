// Methods of the pool that cache prompts: match, insert, and what removes them.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "arguments.h"
#include "bind.h"
#include "gil.h"
#include "kvpool/pool/pool.h"
#include "matching.h"
#include "node.h"
#include "service.h"
#include "stream.h"
#include "vectors.h"

namespace kvpool::bindings {
namespace {

// Of the blocks that an insertion stores.
enum class Content : std::uint8_t { kThere, kToCome };

std::vector<InsertOutcome> insert_items(Pool& pool, std::string_view name, const std::vector<InsertItem>& items,
                                        bool free_duplicates, Content content) {
  if (content == Content::kThere) return pool.insert(name, items, free_duplicates);
  std::vector<InsertOutcome> outcomes;
  outcomes.reserve(1);
  outcomes.push_back(pool.insert_unfilled(name, items.front(), free_duplicates));
  return outcomes;
}

// REQUIRES: one prompt, if its content is to come.
std::vector<Inserted> insert_all(const PoolPointer& pool, const std::vector<std::pair<py::object, py::object>>& prompts,
                                 py::handle name_argument, py::handle free_duplicates_argument,
                                 Content content = Content::kThere) {
  const std::string_view name = name_from(name_argument);
  const bool free_duplicates = flag_from(free_duplicates_argument, "free_duplicates");
  std::vector<Vector<Token>> tokens;
  std::vector<Vector<Address>> addresses;
  std::vector<Inserted> inserted(prompts.size());
  std::vector<InsertItem> items;
  tokens.reserve(prompts.size());
  addresses.reserve(prompts.size());
  items.reserve(prompts.size());
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    const Vector<Token>& own_tokens = tokens.emplace_back(tokens_from(prompts[i].first));
    const Vector<Address>& own_addresses = addresses.emplace_back(addresses_from(prompts[i].second));
    py::array_t<Address> canonical(static_cast<py::ssize_t>(own_addresses.size()));
    items.push_back(
        {own_tokens.data(), own_tokens.size(), own_addresses.data(), own_addresses.size(), canonical.mutable_data()});
    inserted[i].addrs = std::move(canonical);
  }
  std::vector<InsertOutcome> outcomes = insert_items(*pool, name, items, free_duplicates, content);
  for (std::size_t i = 0; i < outcomes.size(); ++i) {
    inserted[i].pins = Pins(pool, outcomes[i].pin);
    inserted[i].tokens = items[i].n_tokens;
    inserted[i].inserted = outcomes[i].inserted;
  }
  for (std::size_t i = 0; i < outcomes.size(); ++i) {
    inserted[i].duplicates = to_array(outcomes[i].duplicates.data(), outcomes[i].duplicates.size());
  }
  return inserted;
}

Inserted insert(const PoolPointer& pool, const py::object& tokens, const py::object& addresses, py::handle name,
                py::handle free_duplicates, py::handle filled) {
  const auto how = flag_from(filled, "filled") ? Content::kThere : Content::kToCome;
  return std::move(insert_all(pool, {{tokens, addresses}}, name, free_duplicates, how).front());
}

// Brings a hit to HBM, or what of it is on DISK to DRAM. The pins of the swap take the place of those of the match,
// which hold until then; if it throws, both are gone.
void bring(const PoolPointer& pool, Match& hit, Medium into, const CallerStream& after) {
  const std::vector<Address> found = addresses_from(hit.addrs).copy();
  const auto there = [&](Address address) {
    return into == Medium::kHbm ? medium_of(address) == Medium::kHbm : medium_of(address) != Medium::kDisk;
  };
  if (std::all_of(found.begin(), found.end(), there)) return;
  py::array_t<Address> arrived(static_cast<py::ssize_t>(found.size()));
  Address* out = arrived.mutable_data();
  call_interruptibly([&](const GivenUp& given_up) {
    hit.pins =
        Pins(pool, into == Medium::kHbm ? pool->swap_in(found, {}, out, after) : pool->bring(found, out, given_up));
  });
  hit.addrs = std::move(arrived);
}

Match match_into(const PoolPointer& pool, py::handle tokens, py::handle name, py::handle into, py::handle stream) {
  if (into.is_none()) {
    if (!stream.is_none()) throw_argument("stream is for a match that brings blocks: give into=kvpool.HBM");
    return match(pool, tokens, name);
  }
  const MediumChoice choice = medium_choice_from(into);
  const bool to_dram = choice == MediumChoice(Medium::kDram) && pool->has_disk();
  if (choice != MediumChoice(Medium::kHbm) && !to_dram) {
    throw_argument(
        "into must be kvpool.HBM (1), kvpool.DRAM (2) for a pool with blocks on DISK, or None: blocks are matched "
        "where "
        "they lie, or brought there");
  }
  if (to_dram && !stream.is_none()) throw_argument("stream is for a match that brings blocks to HBM");
  const CallerStream after = stream_from(stream);
  for (;;) {
    Match hit = match(pool, tokens, name);
    try {
      bring(pool, hit, to_dram ? Medium::kDram : Medium::kHbm, after);
      return hit;
    } catch (const Error& error) {
      // What was damaged is not cached any more: the hit ends before it.
      if (error.cause() != ErrorCause::kLostOnDisk) throw;
    }
  }
}

py::tuple explain(Pool& pool, py::handle tokens_argument, py::handle name_argument) {
  const Vector<Token> tokens = tokens_from(tokens_argument);
  const MatchExplanation found = pool.explain(name_from(name_argument), tokens.data(), tokens.size());
  return py::make_tuple(found.requested_tokens, found.matched_pages, found.partial_tokens, static_cast<int>(found.end),
                        to_array(found.addresses.data(), found.addresses.size()), found.elsewhere);
}

}  // namespace

void bind_prompts(PoolClass& pool) {
  pool.def("match", of_pool(&match_into), py::arg("tokens"), py::arg("namespace") = "", py::kw_only(),
           py::arg("into") = py::none(), py::arg("stream") = py::none(),
           R"(Finds the longest cached prefix of a prompt, in whole blocks, and pins it.

Thread-safe. The cost depends on the length of the prompt, not on the size of the index.

Args:
    tokens: Token ids; int32 or int64 array, buffer, bytes as int32, or list.
    namespace: Prefixes of different namespaces never match each other.
    into: kvpool.HBM: brings blocks of the hit from DRAM and DISK to HBM, as by swap_in, so that every address of the
        hit is in HBM. kvpool.DRAM, for a pool with blocks on DISK: brings those to DRAM. Releases the GIL then. A block
        that is damaged on disk is not there: the hit ends before it. None: the blocks stay where they are.
    stream: With ``into=kvpool.HBM``: as in swap_in.

Returns:
    A Match. Its local addresses stay valid, and their content unchanged, until it is closed; use it in a ``with``.

Raises:
    OutOfBlocks: With `into`: there is no room for the whole hit, and nothing is pinned. A match without `into` still
        finds the hit. Blocks that have come from DISK to DRAM on the way to HBM stay there.
    DeadlineExceeded: With `into`: the disk did not answer within the setting ``timeout_s``.)")
      .def("_match_batch", of_pool(&match_batch<Pool>), py::arg("prompts"), py::arg("namespace"))
      .def("insert", of_pool(&insert), py::arg("tokens"), py::arg("addrs"), py::arg("namespace") = "",
           py::arg("free_duplicates") = false, py::kw_only(), py::arg("filled") = true,
           R"(Gives blocks to the index: active becomes historical, without a copy.

All or nothing, thread-safe. If a block of the prompt is cached already, the cached block stays: the given one is a
duplicate, which the caller still owns. ``addrs`` may begin with the addresses of a match, unchanged.

Args:
    tokens: Token ids of whole blocks.
    addrs: One address for each block.
    namespace: As in match.
    free_duplicates: Free duplicates instead of leaving them to the caller.
    filled: False if the content of the blocks is still to come, from somebody who writes to them beside the pool. Match
        finds them at once, and it is for the caller to order what reads them after what fills them. Until ``filled`` is
        called, the pool keeps them where they are, and what would read them raises Busy:
        transfers, copies, swaps, sequences, and the fetches of peers, for which the prompt ends before them.

Returns:
    An Inserted with the canonical addresses, pinned until it is closed.

Raises:
    ArgumentError: Tokens are no multiple of a block; too few, too many or duplicate addresses.
    StateError: A block is cached already for other tokens, or an engine allocates it.
    StaleAddress: A block was freed or moved.)")
      .def("filled", of_pool([](Pool& pool, py::handle addresses_argument) {
             const Vector<Address> addresses = addresses_from(addresses_argument);
             pool.filled({addresses.data(), addresses.size()});
           }),
           py::arg("addrs"), R"(Says that the content of blocks that were inserted with ``filled=False`` is there.

All or nothing, thread-safe. If it could not be written, call ``forget`` before: then this says that nothing writes to
the blocks any more. They stay unreadable (StateError), and become free with their last pin.

Args:
    addrs: Addresses of such blocks, all of one insertion or some.

Raises:
    StateError: A block is not being filled. StaleAddress, NotOwner, ArgumentError: As for free.)")
      .def("forget", of_pool([](Pool& pool, py::handle addresses_argument) {
             const std::vector<Address> addresses = addresses_from(addresses_argument).copy();
             const GilReleased released;
             return pool.forget(addresses);
           }),
           py::arg("addrs"), R"(Drops cached blocks for good, and everything that continues them. Thread-safe.

For blocks whose content turned out to be wrong. No match finds them from now on. Those that are pinned stay readable by
their addresses until the last of their pins is released, but not for peers, whose fetches raise StaleAddress; the
others are free at once. A save, a transfer or a fetch under way that builds on them raises Busy when it ends: it can be
tried again. What lies on DISK is erased there in the background, as soon as the drive allows: a process that is killed
within that moment may find it after its restart; ``flush`` returns when it is gone for good.

Args:
    addrs: Addresses of cached blocks. Those that are gone already, because they were evicted or forgotten, are skipped.

Returns:
    How many blocks are found no more: these and what continued them.

Raises:
    StateError: A block is not cached. NotOwner, ArgumentError: As for free. Then nothing was dropped.)")
      .def("_insert_batch",
           of_pool([](const PoolPointer& pool, py::handle prompts, py::handle name, py::handle free_duplicates) {
             return insert_all(pool, pairs_from(prompts, "prompts"), name, free_duplicates);
           }),
           py::arg("prompts"), py::arg("namespace"), py::arg("free_duplicates"))
      .def("delete",
           of_pool([](Pool& pool, py::handle tokens_argument, py::handle name_argument, py::handle descendants) {
             const bool longer = flag_from(descendants, "descendants");
             const Vector<Token> tokens = tokens_from(tokens_argument);
             const std::string name(name_from(name_argument));
             const GilReleased released;
             return pool.erase(name, tokens.data(), tokens.size(), longer);
           }),
           py::arg("tokens"), py::arg("namespace") = "", py::arg("descendants") = false,
           R"(Removes the cached blocks of a prompt that no longer prompt shares.

On DISK they are erased in the background, as by ``forget``.

Args:
    tokens: Token ids.
    namespace: As in match.
    descendants: Also remove every longer prompt that begins with this one.

Returns:
    Blocks removed.

Raises:
    StateError: Part of it is pinned; nothing was removed.)")
      .def("evict", of_pool([](Pool& pool, py::handle n_argument, py::handle medium_argument) {
             const std::size_t n = count_from(n_argument, "n");
             const MediumChoice medium = any_medium_from(medium_argument);
             const GilReleased released;
             return pool.evict(n, medium);
           }),
           py::arg("n"), py::arg("medium") = static_cast<int>(Medium::kDram),
           "Drops up to n cached blocks of a medium for good, the least recently used first. Returns how many.")
      .def("_explain", of_pool(&explain), py::arg("tokens"), py::arg("namespace"));
}

}  // namespace kvpool::bindings
