"""What SGLang has looked up and queued: pages that are pinned until they have been loaded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpool import _core

__all__ = ["Lookups", "QueuedLoad"]


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
    """Pins what was looked up last until it is loaded: otherwise a save could evict it in between.

    SGLang does not say when it gives a look-up up. It looks each request up once more right before it queues its load,
    so the pins of older look-ups would serve nobody and take room from saves. Not thread-safe.

    Args:
        cache: Where the pages are.
    """

    def __init__(self, cache: _core.KeyedCache) -> None:
        self._cache = cache
        self._latest: _core.KeyedMatch | None = None

    def look_up(self, keys: list[str]) -> int:
        """How many pages are stored, from the first on. Ends the pins of the look-up before."""
        hit = self._cache.match(keys)
        self.clear()
        self._latest = hit
        return hit.first

    def take(self, keys: list[str]) -> _core.KeyedMatch | None:
        """Pins the pages for their load, in place of the look-up; None if they are not all there."""
        hit = self._cache.match(keys)
        self.clear()
        if hit.first == len(keys):
            return hit
        hit.close()
        return None

    def clear(self) -> None:
        """Ends the pins."""
        hit, self._latest = self._latest, None
        if hit is not None:
            hit.close()
