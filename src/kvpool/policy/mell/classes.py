"""Classes of requests by their size, §VI-C of the paper, as exact integer comparisons.

L  above C/2           at most one on a GPU
M  above C/3           at most two
S  above C/4           at most three
T  above C/8           at most seven
small, C/8 and less    move as groups of at most C/4, each counted as one T
"""

from __future__ import annotations

from enum import IntEnum

__all__ = ["Class", "class_of", "groups_at_most", "role_name"]


class Class(IntEnum):
    """The class of a request. Larger requests have larger values."""

    SMALL = 0
    T = 1
    S = 2
    M = 3
    L = 4


def class_of(size: int, capacity: int) -> Class:
    """The class of a request of `size` tokens on GPUs of `capacity` tokens."""
    if 4 * size <= capacity:
        return Class.T if 8 * size > capacity else Class.SMALL
    if 3 * size <= capacity:
        return Class.S
    return Class.M if 2 * size <= capacity else Class.L


def groups_at_most(total: int, capacity: int) -> int:
    """How many groups carry away small requests of `total` tokens, at most.

    Groups of at most C/4 are filled one after the other with requests of at most C/8. One that the next request no
    longer fits holds more than C/8, and what is at most C/4 is one group.
    """
    if total <= 0:
        return 0
    return max(1, -(-8 * total // capacity) - 1)


def role_name(role: Class) -> str:
    """The name in texts of a GPU whose largest class is `role`: "T-GPU" also if all its requests are small."""
    return f"{max(role, Class.T).name}-GPU"
