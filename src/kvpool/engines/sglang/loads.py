"""What SGLang has looked up and queued: pages that are pinned until they have been loaded."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpool import _core

__all__ = ["Lookups", "QueuedLoad"]

_LOOKUPS_MAX = 64


@dataclass
class QueuedLoad:
    """A load that SGLang has queued.

    Attributes:
        keys: Of its pages.
        pages: Numbers of the device's pages to fill.
        hit: What pins the stored pages; None if they are not all there.
    """

    keys: list[str]
    pages: npt.NDArray[np.int64]
    hit: _core.KeyedMatch | None = None

    def close(self) -> None:
        """Ends the pins."""
        if self.hit is not None:
            self.hit.close()


class Lookups:
    """Pins what was looked up until it is loaded: otherwise a save could evict it in between.

    SGLang does not say when it gives a look-up up, so only those of the last 64 requests count.

    Args:
        cache: Where the pages are.
    """

    def __init__(self, cache: _core.KeyedCache) -> None:
        self._cache = cache
        self._hits: OrderedDict[str, _core.KeyedMatch] = OrderedDict()

    def look_up(self, rid: str, keys: list[str] | list[bytes]) -> int:
        """How many pages are stored, from the first on."""
        hit = self._cache.match(keys)
        self._drop(rid)
        if hit.first:
            self._hits[rid] = hit
        while len(self._hits) > _LOOKUPS_MAX:
            self._drop(next(iter(self._hits)))
        return hit.first

    def take(self, rid: str, keys: list[str] | list[bytes]) -> _core.KeyedMatch | None:
        """Pins the pages for their load, in place of the look-up; None if they are not all there."""
        hit = self._cache.match(keys)
        self._drop(rid)
        if hit.first == len(keys):
            return hit
        hit.close()
        return None

    def clear(self) -> None:
        """Ends all pins."""
        while self._hits:
            self._drop(next(iter(self._hits)))

    def _drop(self, rid: str) -> None:
        hit = self._hits.pop(rid, None)
        if hit is not None:
            hit.close()
