"""Which stored blocks go, by age and by size: the least recently used first. Pure; not thread-safe.

`victims` decides over a whole listing. `Sweep` decides while a store is written to, with bounded work: it looks at a
few of the folders for each block that is written. Keys are hashes, so each folder has about the same part of a store,
and a few say how large it is: what others write to it counts, and a process that writes one block sweeps as well.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvpool.storage.folders import FOLDERS, StoredFile

__all__ = ["Sweep", "victims"]

_ROUND: Final = 1 / 8  # of the largest size: a sweep comes round while that much is written
_SAMPLE: Final = 16  # folders that a sweep begins with
_SAMPLE_BLOCKS: Final = 1000  # so many, of those seen last, say how large a store is and how old its blocks are
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
        self._due = 0.0 if size_max is None else float(_SAMPLE)
        self._seen: OrderedDict[int, npt.NDArray[np.int64]] = OrderedDict()  # rows of used_ns and size; seen last: last

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

    def saw(self, folder: int, files: Sequence[StoredFile]) -> None:
        """A folder was looked at, and has these files."""
        self._seen[folder] = np.array([(one.used_ns, one.size) for one in files], np.int64).reshape(-1, 2)
        self._seen.move_to_end(folder)

    def gone(self, files: Sequence[StoredFile], now_ns: int) -> list[StoredFile]:
        """The files of a folder that must go, by all that was seen so far.

        Args:
            files: What it has.
            now_ns: By the same clock as `used_ns`.
        """
        limit = self._used_before()
        if self._age_max_s is not None:
            limit = max(limit, now_ns - math.ceil(self._age_max_s * 1e9) - 1)
        return [one for one in files if one.used_ns <= limit]

    def _used_before(self) -> int:
        """The time of last use up to which blocks go for the store's size; -1 for none, or before enough was seen."""
        if self._size_max is None or len(self._seen) < _SAMPLE:
            return -1
        sample: list[npt.NDArray[np.int64]] = []
        blocks = 0
        for rows in reversed(self._seen.values()):
            sample.append(rows)
            blocks += len(rows)
            if len(sample) >= _SAMPLE and blocks >= _SAMPLE_BLOCKS:
                break
        rows = np.concatenate(sample)
        total = int(rows[:, 1].sum()) * FOLDERS // len(sample)
        if total <= self._size_max:
            return -1
        part = 1 - self._size_max * _GOAL / total
        rows = rows[:: max(1, len(rows) // _SAMPLE_MAX)]
        rows = rows[np.argsort(rows[:, 0])]
        sizes = np.cumsum(rows[:, 1])
        return int(rows[np.searchsorted(sizes, part * sizes[-1]), 0])
