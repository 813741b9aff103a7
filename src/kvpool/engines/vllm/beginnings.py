"""Where tails begin that were found, and states that were saved: a name says where, and it takes long to try all."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["Beginnings"]

_MAX: Final = 1 << 16
_FACTORS: Final = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5)


class Beginnings:
    """The names of tails and of states, which are tails of one block. Not thread-safe.

    It remembers 65,536 of them, those that were used last. The last tokens before a tail say quickly that it is not of
    a prompt; its name, which is a hash of all of them, says that it is.
    """

    def __init__(self) -> None:
        self._names: OrderedDict[str, tuple[int, int]] = OrderedDict()  # where it begins, and a key of the tokens there
        self._keys: Counter[int] = Counter()
        self._begins: Counter[int] = Counter()
        self._sorted: npt.NDArray[np.int64] | None = None  # the begins; None: they have changed

    def add(self, name: str, tokens: npt.NDArray[np.int32], begin: int) -> None:
        """A tail is cached.

        Args:
            name: Its namespace.
            tokens: Of a prompt that has it.
            begin: At which token it begins.
        """
        if name not in self._names:
            self._names[name] = begin, _keys(tokens, np.array([begin]))[0]
            self._count(*self._names[name], 1)
        self._names.move_to_end(name)
        while len(self._names) > _MAX:
            self._count(*self._names.popitem(last=False)[1], -1)

    def likely(self, tokens: npt.NDArray[np.int32], last: int) -> list[int]:
        """At which tokens tails may begin that a prompt has, up to `last`; the last one first."""
        if self._sorted is None:
            self._sorted = np.array(sorted(self._begins), np.int64)
        begins = self._sorted[: np.searchsorted(self._sorted, last, "right")]
        keys = _keys(tokens, begins)
        return [begin for begin, key in zip(begins.tolist(), keys, strict=True) if key in self._keys][::-1]

    def __contains__(self, name: str) -> bool:
        """Whether a tail has this name."""
        return name in self._names

    def _count(self, begin: int, key: int, change: int) -> None:
        for counter, one in ((self._keys, key), (self._begins, begin)):
            counter[one] += change
            if not counter[one]:
                del counter[one]
        self._sorted = None if self._begins[begin] <= 1 else self._sorted


def _keys(tokens: npt.NDArray[np.int32], begins: npt.NDArray[np.int64]) -> list[int]:
    """Of the last tokens before each of these, and of where they are."""
    keys = begins.astype(np.uint64)
    for back, factor in enumerate(_FACTORS, 1):
        before = tokens[np.maximum(begins - back, 0)].astype(np.uint64)
        keys = (keys ^ before) * np.uint64(factor)
    return [int(key) for key in keys.tolist()]
