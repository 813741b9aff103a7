"""Bugs of a space of several models, for `make planted`."""

from __future__ import annotations

from typing import Final

from tools.planted_kit import Bug, in_cpp, in_python

__all__ = ["SPACE_BUGS"]

_PLAN: Final = ("quotas_test.cpp", "space_quotas_test.cpp")
_QUOTAS: Final = ("space_quotas_test.cpp",)
_PLACES: Final = ("space_places_test.cpp",)
_MOVES: Final = ("space_quotas_moves_test.cpp",)
_UNITS: Final = ("unit_set_test.cpp", "shared_space_test.cpp")
_PIECES: Final = ("block_pieces_test.cpp",)
_SPACE: Final = ("python/test_space.py",)
_END: Final = ("python/test_space_end.py",)

SPACE_BUGS: Final = (
    Bug(
        "space-reserve-evicted-by-a-neighbour",
        "blocks",
        "a model grows at the cost of what another has cached within its reserve (P)",
        in_cpp("blocks/quotas.cpp", "within ? its.rule.reserve :", "within ? 0U :"),
        _PLAN,
    ),
    Bug(
        "pins-are-not-admitted",
        "pool",
        "a match pins what others' reserves need, and they cannot be restored (Z4)",
        in_cpp(
            "pool/cache_quotas.cpp",
            "return hit.pages == 0 || !overdrawn_since(before, {});",
            "return hit.pages == 0 || before.blocks[Medium::kDisk] == 0;",
        ),
        _QUOTAS,
    ),
    Bug(
        "pinned-move-counts-as-historical",
        "index",
        "a block that is pinned on its way to DRAM is still promised to others (Z4)",
        in_cpp(
            "index/prompt_index.cpp",
            "    if (node->payload.held) held_of(node->payload.value_class) -= node->pages;\n",
            "",
        ),
        _MOVES,
    ),
    Bug(
        "moved-blocks-pinned-unchecked",
        "pool",
        "an insertion or a swap in pins blocks on their way to DRAM that others' reserves need (Z4)",
        in_cpp(
            "pool/cache_quotas.cpp",
            "before.blocks[medium] = pinnable(medium);",
            "before.blocks[medium] = evictable(medium);",
        ),
        _MOVES,
    ),
    Bug(
        "closed-pool-keeps-what-was-pinned",
        "pool",
        "the cache that was pinned when its pool was closed is out of everybody's reach for ever",
        in_cpp("pool/prompt_cache.cpp", "index_.unpin(pins[i]);\n  drop_if_ended();\n", "index_.unpin(pins[i]);\n"),
        _QUOTAS,
    ),
    Bug(
        "closed-pool-gets-rules",
        "blocks",
        "a model whose pool was closed gets a reserve that it can never use",
        in_cpp(
            "blocks/space_quotas.cpp",
            "  if (seats_[number].ended) {",
            "  if (seats_[number].held && seats_[number].ended) {",
        ),
        _QUOTAS,
    ),
    Bug(
        "caches-dropped-before-places-are-counted",
        "pool",
        "an allocation that can find no places drops other models' caches",
        in_cpp("pool/space_reclaimer.cpp", "bool places_counted = false;", "bool places_counted = true;"),
        _QUOTAS,
    ),
    Bug(
        "place-cleared-below-a-reserve",
        "pool",
        "a place is made of blocks whose prompts go with them, down into their owner's reserve",
        in_cpp(
            "pool/space_reclaimer.cpp", "> can_lose(model, size)) return false;", "> model.historical) return false;"
        ),
        _QUOTAS,
    ),
    Bug(
        "read-blocks-count-as-given-up-for-ever",
        "blocks",
        "blocks that were freed while a transfer read them count as historical when they are active again (Z4)",
        in_cpp("blocks/cache_blocks_read.cpp", "    --unread_[medium_of(addresses[i])];\n", ""),
        ("cache_blocks_test.cpp",),
    ),
    Bug(
        "limit-stays-low",
        "blocks",
        "a limit that is raised again lets no growth through",
        in_cpp(
            "blocks/space_quotas.cpp",
            "  seats_[number].rules = rules;\n",
            """  for (const Medium medium : kMedia) {
    QuotaRule& rule = seats_[number].rules[medium];
    const std::uint32_t before = rule.limit;
    rule = rules[medium];
    if (before > 0) rule.limit = std::min(before, rule.limit);
  }
""",
        ),
        _QUOTAS,
    ),
    Bug(
        "tail-of-a-block-lost",
        "blocks",
        "the last unit of a block is not given back: the space shrinks (Z5)",
        in_cpp(
            "blocks/unit_set.cpp",
            "free_.insert(first, size * n);",
            "free_.insert(first, size * n - (size > 1 ? 1 : 0));",
        ),
        _UNITS,
    ),
    Bug(
        "read-block-gives-up-its-units",
        "blocks",
        "another model takes the units of a block that was freed while a transfer reads it (L2)",
        in_cpp(
            "blocks/cache_blocks.cpp",
            "      wait_for_readers(medium, block);\n    } else if",
            "      wait_for_readers(medium, block);\n"
            "      space_.mutable_units(medium).give_back(block, block_units_, 1);\n    } else if",
        ),
        ("shared_space_test.cpp",),
    ),
    Bug(
        "abandoned-units-belong-to-the-next",
        "blocks",
        "blocks that a closed cache left behind belong to the next cache in its place",
        in_cpp("blocks/unit_set.cpp", "words_[first] |= kNobodysOwner << kOwnerShift", "words_[first] |= 0U"),
        _UNITS,
    ),
    Bug(
        "swap-moves-the-first-piece",
        "blocks",
        "a block in pieces is moved between tiers with its first piece only",
        in_cpp(
            "blocks/block_copy.cpp",
            "piece < from_pieces_.pieces(); ++piece",
            "piece < 1; ++piece",
        ),
        _PIECES,
    ),
    Bug(
        "pieces-freed-in-part",
        "blocks",
        "the first piece of a block is not given back with the others",
        in_cpp(
            "blocks/cache_blocks.cpp",
            "give_back_pieces(run_units(), pieces_[medium]->units_of(block));",
            "give_back_pieces(run_units(), pieces_[medium]->units_of(block).subspan(1));",
        ),
        _PIECES,
    ),
    Bug(
        "freed-block-stays-scattered",
        "blocks",
        "a block that is whole is read where an earlier one with its number had its pieces",
        in_cpp("blocks/block_pieces.cpp", "  list_of_[slot_of(block)] = 0;\n", ""),
        _PIECES,
    ),
    Bug(
        "pieces-of-nobody",
        "blocks",
        "the pieces of a block name no block: an eviction, or a cache that leaves, frees another one",
        in_cpp(
            "blocks/unit_set.cpp",
            "for (const std::uint32_t first : firsts) words_[first] = word;",
            "for (const std::uint32_t first : firsts) words_[first] = extent_word(size, owner, first) + 0 * word;",
        ),
        _PIECES,
    ),
    Bug(
        "slot-of-any-block",
        "blocks",
        "the number of an earlier block of a slot is valid with the generation of the block that has it now",
        in_cpp(
            "blocks/block_store.h",
            "(first_of_ == nullptr || first_of_[slot] == block) &&\n           meta_[slot].releases()",
            "block < numbers_ && meta_[slot].releases()",
        ),
        ("block_store_generations_test.cpp",),
    ),
    Bug(
        "transfer-assumes-one-run",
        "base",
        "a block in pieces is sent as if it lay in one run: the bytes of other models are sent, and overwritten",
        in_cpp(
            "base/strips.cpp",
            "return from_[medium_of(from)].places != nullptr || to_[medium_of(to)].places != nullptr;",
            "return from_[medium_of(from)].blocks == 0 && to_[medium_of(to)].blocks == 0;",
        ),
        ("cut_blocks_test.cpp",),
    ),
    Bug(
        "frame-assumes-one-run",
        "base",
        "content that comes over a socket is placed as if its block lay in one run",
        in_cpp(
            "base/strips.cpp",
            "if (spans_[medium].places != nullptr) [[unlikely]] {",
            "if (spans_[medium].blocks == 0) {",
        ),
        ("cut_blocks_test.cpp",),
    ),
    Bug(
        "blocks-of-units-overlap",
        "cuda",
        "a kernel writes blocks of a space of which one begins within another",
        in_cpp(
            "cuda/kernel_plan.cpp",
            "*distance >= (strip.bytes - 1) / strip.to_stride + 1",
            "*distance > 0",
        ),
        ("kernels_test.cpp",),
    ),
    Bug(
        "generations-of-a-cache-that-left",
        "blocks",
        "a cache that joins a space gives out addresses that one which has left it gave out before (Z3)",
        in_cpp("blocks/block_store.h", "return first_generation_ + generations_given_;", "return first_generation_;"),
        ("shared_space_test.cpp",),
    ),
    Bug(
        "generations-given-are-not-counted",
        "blocks",
        "a cache that joins a space gives out addresses that one which has left it gave out before (Z3)",
        in_cpp("blocks/block_store.cpp", "given = std::max(given, word + BlockMeta::kOneRelease);", "given = word;"),
        ("block_store_generations_test.cpp",),
    ),
    Bug(
        "never-used-slots-are-block-zero",
        "blocks",
        "the audit of a space fails when its first block was freed while a transfer read it: each call fails then (L2)",
        in_cpp(
            "blocks/cache_blocks.cpp",
            "if (!blocks.slot_taken(slot)) {",
            "if (blocks.state(blocks.block_in(slot)) == BlockState::kFree) {",
        ),
        ("shared_space_test.cpp",),
    ),
    Bug(
        "unit-numbers-as-a-ranks-blocks",
        "pool",
        "a model's pool of a space becomes the memory of a rank, whose blocks then overlap",
        in_cpp("pool/pool_blocks.cpp", "if (!blocks_->space().shared()) return;", "if (pieces() == 1) return;"),
        ("shared_pools_test.cpp",),
    ),
    Bug(
        "place-across-a-block-in-use",
        "pool",
        "units on both sides of a block in use are counted as a place, and caches are dropped in vain",
        in_cpp(
            "pool/space_reclaimer.cpp",
            "      begin_again(extent.end());\n      return false;",
            "      return false;",
        ),
        _QUOTAS,
    ),
    Bug(
        "count-of-places-begins-anew",
        "pool",
        "a place that is seen in part before others get the lock is never counted",
        in_cpp(
            "pool/space_reclaimer.cpp",
            "++ >= kVisitsMax) return window.first();",
            "++ >= kVisitsMax) return unit;",
        ),
        _PLACES,
    ),
    Bug(
        "search-for-places-begins-anew",
        "pool",
        "a place that is seen in part before others get the lock is never cleared",
        in_cpp("pool/space_reclaimer.cpp", "return unit < units.size() ? window.first() : unit;", "return unit;"),
        _PLACES,
    ),
    Bug(
        "part-of-a-place-counted-twice",
        "pool",
        "units of a place are counted for the next one as well, and caches are dropped in vain",
        in_cpp("pool/space_reclaimer.cpp", "    if (extent.first < from) extent = {from, unit - from};\n", ""),
        _PLACES,
    ),
    Bug(
        "each-piece-counts-as-a-block",
        "pool",
        "a model loses no block in pieces, since each of them counts as one that it may not lose",
        in_cpp(
            "pool/space_reclaimer.cpp",
            " && !has_piece(*owner->blocks, medium_, extent.block, first(), extent.first)",
            "",
        ),
        _PLACES,
    ),
    Bug(
        "each-piece-has-the-price-of-a-block",
        "pool",
        "a place costs a block in pieces as often as they lie in it, more than its model has",
        in_cpp(
            "pool/space_reclaimer.cpp",
            "    if (has_piece(*member->blocks, medium, extent.block, place.first, extent.first)) continue;",
            "    if (false) continue;",
        ),
        _PLACES,
    ),
    Bug(
        "place-cleared-that-makes-no-room",
        "pool",
        "caches are dropped in a place that overlaps one that was cleared",
        in_cpp("pool/space_reclaimer.cpp", "return place.blocks > 0;", "return true;"),
        _PLACES,
    ),
    Bug(
        "places-cleared-without-end",
        "pool",
        "caches are dropped in all places of a hold, however few blocks are wanted",
        in_cpp("pool/space_reclaimer.cpp", "      if (missing == 0) break;\n      made = 0;", "      made = 0;"),
        _PLACES,
    ),
    Bug(
        "models-share-their-generations",
        "blocks",
        "an address of one model is valid for another, which frees a block that is not its own (Z3)",
        in_cpp("blocks/block_space.cpp", "range.first = number * width + 1 +", "range.first = 1 +"),
        (*_QUOTAS, "shared_space_test.cpp"),
    ),
    Bug(
        "closed-pool-keeps-its-reserve",
        "pool",
        "a model whose pool was closed holds back memory that it can never use",
        in_cpp("pool/pool.cpp", "      space_->end_rules(blocks_->number());\n", ""),
        _QUOTAS,
    ),
    Bug(
        "unload-does-not-hold-growth",
        "blocks",
        "a model that is being unloaded gets blocks, and the units are lost with it",
        in_cpp("blocks/space_quotas.cpp", "  if (seats_[cache.number()].held) return 0;\n", ""),
        _QUOTAS,
    ),
    Bug(
        "space-quota-sum-drifts",
        "space",
        "the quota of the model that came last is not set, and all together are not the capacity",
        in_python(
            "space/quotas.py", "for name, model in models.items()]\n", "for name, model in [*models.items()][:-1]]\n"
        ),
        _SPACE,
        build="python",
    ),
    Bug(
        "closed-pools-follow",
        "space",
        "the reserve of a closed pool makes every later load fail, and the model is registered all the same",
        in_python(
            "space/model.py",
            'return self.state != "kept" and not self.pool.closed',
            'return self.state != "kept"',
        ),
        _END,
        build="python",
    ),
    Bug(
        "unload-with-an-open-pin",
        "space",
        "a model is unloaded while a request still reads its blocks",
        in_python("space/leaving.py", "pinned = sum(tier.pinned for tier in tiers)", "pinned = 0"),
        _END,
        build="python",
    ),
    Bug(
        "refused-unload-holds-the-model",
        "space",
        "a model whose unloading was refused gets no more blocks",
        in_python("space/models.py", 'held=before == "kept")', "held=True)"),
        _END,
        build="python",
    ),
)
