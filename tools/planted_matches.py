"""Bugs of matches at peers and of fetches of prompts, for `make planted`."""

from __future__ import annotations

from typing import Final

from tools.planted_kit import Bug, in_cpp

__all__ = ["MATCH_BUGS"]

_OWNER: Final = ("peer_match_test.cpp",)

MATCH_BUGS: Final = (
    Bug(
        "hold-outlives-its-peer",
        "transfer",
        "blocks that a peer had matched stay pinned when it dies: the pool fills up with what nobody reads",
        in_cpp("transfer/held_matches.cpp", "  ended.swap(held_);\n", ""),
        _OWNER,
    ),
    Bug(
        "late-answer-keeps-its-hold",
        "transfer",
        "the answer to a match that was closed before stays held at the peer until its deadline",
        in_cpp("transfer/peer_match.cpp", "if (answer != nullptr && (!wanted || wrong)) let_go();\n", ""),
        _OWNER,
    ),
    Bug(
        "refused-match-counts",
        "transfer",
        "blocks of matches that were let go of still count: a peer gets Busy although it holds nothing",
        in_cpp("transfer/held_matches.cpp", "  blocks_ -= entry->second.blocks;\n", ""),
        _OWNER,
    ),
    Bug(
        "inserts-what-did-not-arrive",
        "transfer",
        "a prompt whose fetch failed is cached with whatever the blocks held before",
        in_cpp("transfer/fetch.cpp", "if (!error && taker_ != nullptr) {", "if (taker_ != nullptr) {"),
        ("prompt_fetch_test.cpp",),
    ),
)
