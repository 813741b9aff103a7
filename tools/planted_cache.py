"""Bugs of cached blocks that are forgotten, or still being filled, for `make planted`."""

from __future__ import annotations

from typing import Final

from tools.planted_kit import Bug, in_cpp

__all__ = ["CACHE_BUGS"]

CACHE_BUGS: Final = (
    Bug(
        "peer-matches-what-is-filled",
        "pool",
        "a peer is told that blocks are there whose content is still to come (A17)",
        in_cpp("pool/prompt_cache.cpp", " && !blocks_.filling(address);", ";"),
        ("cache_fill_test.cpp",),
    ),
    Bug(
        "read-while-filled",
        "blocks",
        "blocks are sent before their content is there (A17)",
        in_cpp(
            "blocks/cache_blocks_read.cpp",
            "      if (state != BlockState::kQuarantined) check_filled(addresses[i], i);\n",
            "",
        ),
        ("cache_fill_test.cpp",),
    ),
    Bug(
        "filled-by-its-first-block",
        "pool",
        "the blocks of an insertion can be evicted when the first of them is filled (A17)",
        in_cpp("pool/cache_fills.cpp", "if (--fill.remaining > 0) continue;", "if (--fill.remaining != 1) continue;"),
        ("cache_fill_test.cpp",),
    ),
    Bug(
        "forgotten-is-moved",
        "pool",
        "a swap in brings a page that was forgotten meanwhile, and pins a node that is gone (P6)",
        in_cpp(
            "pool/cache_moves.cpp",
            "  check_not_forgotten(pending.addresses);\n  redirect(pending);",
            "  redirect(pending);",
        ),
        ("cache_forget_test.cpp",),
    ),
    Bug(
        "forgotten-for-ever",
        "index",
        "blocks that were forgotten while they were pinned never become free (P6)",
        in_cpp("index/prompt_index.cpp", "      if (node->payload.forgotten) {", "      if (false) {"),
        ("cache_forget_test.cpp", "prompt_index_fuzz_test.cpp"),
    ),
    Bug(
        "blocks-while-it-is-emptied",
        "blocks",
        "HBM gives out blocks while an engine waits to unmap it: it never sleeps, or what is written is gone",
        in_cpp("blocks/cache_blocks.cpp", "if (hbm_closed_ && medium == Medium::kHbm && n > 0) return false;", ""),
        ("suspend_test.cpp",),
    ),
    Bug(
        "asleep-under-a-reader",
        "blocks",
        "HBM is unmapped while a transfer or a sequence still reads it: the process dies",
        in_cpp(
            "blocks/cache_blocks_suspend.cpp",
            "use.read += readers[block] > 0 ? 1 : 0",
            "use.read += 0 * readers[block]",
        ),
        ("suspend_test.cpp",),
    ),
    Bug(
        "asleep-is-no-error",
        "transfer",
        "a peer that asks a suspended pool for HBM gets a code that it does not know, and disconnects",
        in_cpp("transfer/messages.cpp", "if (error.code() == ErrorCode::kSuspended) {", "if (false) {"),
        ("messages_test.cpp",),
    ),
)
