"""What the cache has of the prompts of waiting requests, pinned: a match for each group of layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvpool import _core

__all__ = ["Hits"]


class Hits:
    """Matches by request and group. Not thread-safe."""

    def __init__(self) -> None:
        self._of: dict[str, dict[int, _core.Match]] = {}

    def find(
        self,
        request_id: str,
        tokens: npt.NDArray[np.int32],
        namespaces: Sequence[str],
        match: Callable[[npt.NDArray[np.int32], str], _core.Match],
    ) -> int:
        """Matches a prompt for every group. Returns the tokens that all of them have, and keeps nothing if that is 0.

        What `match` raises is raised, and nothing is kept then. REQUIRES: the request has no matches.
        """
        hits: dict[int, _core.Match] = {}
        found = len(tokens)
        try:
            for group, namespace in enumerate(namespaces):
                hits[group] = match(tokens[:found], namespace)
                found = hits[group].tokens
                if not found:
                    break
        except BaseException:
            found = 0
            raise
        finally:
            if found:
                self._of[request_id] = hits
            else:
                for hit in hits.values():
                    hit.close()
        return found

    def take(self, request_id: str, group: int) -> _core.Match | None:
        """The match of one group, which the caller closes."""
        hits = self._of.get(request_id, {})
        hit = hits.pop(group, None)
        if not hits:
            self._of.pop(request_id, None)
        return hit

    def __len__(self) -> int:
        """How many requests have some."""
        return len(self._of)

    def close(self, request_id: str) -> None:
        """Closes those of a request that were not taken."""
        for hit in self._of.pop(request_id, {}).values():
            hit.close()

    def close_all(self) -> None:
        """Closes those of all requests."""
        for request_id in list(self._of):
            self.close(request_id)
