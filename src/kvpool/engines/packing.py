"""What the shape of a page does not say: attention that packs keys or values inside it, as vLLM's on a CPU does.

A pool moves such pages as they are, and cannot see it. So an engine adds the name of the packing to the fingerprint of
its model (the setting ``model``), which peers compare when they connect: engines whose pages differ inside refuse each
other, and one that knows the packing can read the pages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from kvpool.pool import Pool

__all__ = ["CPU_COLUMNS", "ROWS", "declare", "joined", "marked", "unmarked"]

ROWS = ""
"""Not packed: a row for each token, as the layout says."""

CPU_COLUMNS = "cpu_attn-vec"
"""Of each head K as [dim, token], then V as [token, dim]: vLLM's attention on a CPU, without AMX and the like."""

_MARK = re.compile(r"(.*)\[pages of ([^\]]+)\]", re.DOTALL)


def marked(model: str, packing: str) -> str:
    """The fingerprint of a model whose pages are packed."""
    return model if packing == ROWS else f"{model}[pages of {packing}]"


def unmarked(fingerprint: str) -> tuple[str, str]:
    """The two parts of a fingerprint: the model's, and the packing."""
    found = _MARK.fullmatch(fingerprint)
    return (fingerprint, ROWS) if found is None else (found[1], found[2])


def joined(packings: Iterable[str]) -> str:
    """One name for pages of which some are packed in one way and some in another."""
    return "+".join(sorted(set(packings) - {ROWS}))


def declare(pool: Pool, packing: str, groups: str) -> None:
    """Says how the pages of a pool are packed. REQUIRES: it has no peers yet, nor listens.

    An engine whose pages are not rows must call it: else others take its pages for rows. So must one with groups of
    layers, whose blocks others would read as those of all layers.

    Args:
        pool: The engine's.
        packing: The name.
        groups: The text by which engines compare their groups of layers; "": one group that attends to all tokens.

    Raises:
        ArgumentError: The setting ``model`` is too long with these names. The pool is closed.
    """
    try:
        pool.settings = replace(pool.settings, model=marked(pool.settings.model + groups, packing))
    except BaseException:
        pool.close()
        raise
