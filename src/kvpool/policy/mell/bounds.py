"""How few GPUs could suffice: lower bounds on the best packing, and the guarantee of Theorem 2."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

__all__ = ["lower_bound", "promised"]


def lower_bound(sizes: Iterable[int], capacity: int) -> int:
    """No packing of these sizes uses fewer GPUs: the bound L2 of Martello and Toth.

    For each threshold k of 0 to C/2: items above C - k fill a GPU each and take nothing of k or more beside them; items
    above C/2 need a GPU each; what those of k to C/2 have beyond the room beside these needs further ones.

    Args:
        sizes: Of all requests, each 1 to `capacity`.
        capacity: C.
    """
    items = np.sort(np.fromiter(sizes, np.int64))
    if not len(items):
        return 0
    sums = np.concatenate(([0], np.cumsum(items)))
    half = int(np.searchsorted(items, capacity // 2, "right"))  # items before it are at most C/2
    thresholds = np.unique(np.concatenate(([0], items[:half])))
    filled = np.searchsorted(items, capacity - thresholds, "right")  # items from here on are above C - k
    first = np.searchsorted(items, thresholds, "left")  # and from here on they are k or more
    alone = len(items) - half
    room = (filled - half) * capacity - (sums[filled] - sums[half])
    beyond = sums[half] - sums[first] - room
    return int(alone + max(0, int(np.max(-(-beyond // capacity)))))


def promised(optimum: int) -> int:
    """The most GPUs of a placement that has the five properties, if the best packing uses `optimum`.

    4/3 of it, and the open GPUs of M, S and T and the mixed one, each counted whole. docs/internals/mell.md proves it.
    """
    return 4 * optimum // 3 + 4
