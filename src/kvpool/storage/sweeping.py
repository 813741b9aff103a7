"""Which stored blocks go, by age and by size: the least recently used first. Pure; not thread-safe.

`victims` decides over a whole listing. `Sweep` decides while a store is written to, with bounded work: it looks at a
few of the folders for each block that is written. Keys are hashes, so each folder has about the same part of a store.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvpool.storage.folders import FOLDERS, StoredFile

__all__ = ["Sweep", "victims"]

# A sweep comes round while this part of the largest size is written. A store may be larger by two rounds.
_ROUND: Final = 1 / 8
_AGE_ONLY_BLOCKS: Final = 64  # for each folder, where there is no largest size
_GOAL: Final = 0.95  # of the largest size, so that not every block that is written makes another one go
_SAMPLE_MAX: Final = 1 << 16


def victims(
    files: Sequence[StoredFile], size_max: int | None, age_max_s: float | None, now_ns: int
) -> list[StoredFile]:
    """The files that must go.

    Args:
        files: All of a store.
        size_max: Bytes that may stay; None: any number.
        age_max_s: Seconds since the last use after which a block goes; None: never.
        now_ns: By the same clock as `used_ns`.
    """
    oldest_first = sorted(files, key=lambda file: file.used_ns)
    left = sum(file.size for file in files)
    gone = []
    for file in oldest_first:
        too_much = size_max is not None and left > size_max
        too_old = age_max_s is not None and file.used_ns < now_ns - age_max_s * 1e9
        if not too_much and not too_old:
            break
        gone.append(file)
        left -= file.size
    return gone


class Sweep:
    """A sweep over the folders of a store that goes on as long as it is written to.

    Args:
        size_max: As in `victims`.
        age_max_s: As in `victims`.
        first: The folder to begin with: processes that share a store begin in different ones.
    """

    def __init__(self, size_max: int | None, age_max_s: float | None, first: int) -> None:
        self._size_max = size_max
        self._age_max_s = age_max_s
        self._next = first % FOLDERS
        self._due = 0.0
        self._seen: list[npt.NDArray[np.int64] | None] = [None] * FOLDERS  # rows of used_ns and size

    def written(self, size: int) -> list[int]:
        """The folders to look at now, because a block of this size was written: at most all of them, once."""
        if self._size_max is not None:
            self._due += size * FOLDERS / (self._size_max * _ROUND)
        elif self._age_max_s is not None:
            self._due += 1 / _AGE_ONLY_BLOCKS
        count = min(int(self._due), FOLDERS)
        self._due = 0.0 if count == FOLDERS else self._due - count
        folders = [(self._next + step) % FOLDERS for step in range(count)]
        self._next = (self._next + count) % FOLDERS
        return folders

    def gone(self, folder: int, files: Sequence[StoredFile], now_ns: int) -> list[StoredFile]:
        """The files of a folder that must go.

        Args:
            folder: Its number.
            files: What it has.
            now_ns: By the same clock as `used_ns`.
        """
        self._seen[folder] = np.array([(one.used_ns, one.size) for one in files], np.int64).reshape(-1, 2)
        limit = self._used_before() if self._size_max is not None else -1
        if self._age_max_s is not None:
            limit = max(limit, now_ns - math.ceil(self._age_max_s * 1e9) - 1)
        gone = [one for one in files if one.used_ns <= limit]
        if gone:
            left = [(one.used_ns, one.size) for one in files if one.used_ns > limit]
            self._seen[folder] = np.array(left, np.int64).reshape(-1, 2)
        return gone

    def _used_before(self) -> int:
        """The time of last use up to which blocks go for the store's size; -1 for none, or before the first round."""
        seen = [rows for rows in self._seen if rows is not None]
        if len(seen) < FOLDERS or self._size_max is None:
            return -1
        rows = np.concatenate(seen)
        total = int(rows[:, 1].sum())
        if total <= self._size_max:
            return -1
        part = 1 - self._size_max * _GOAL / total
        rows = rows[:: max(1, len(rows) // _SAMPLE_MAX)]
        rows = rows[np.argsort(rows[:, 0])]
        sizes = np.cumsum(rows[:, 1])
        return int(rows[np.searchsorted(sizes, part * sizes[-1]), 0])
