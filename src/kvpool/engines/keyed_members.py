"""The other members of a cluster that keep blocks under the same keys as this engine.

Several engines, or several stores of one, may be members of a cluster. Those whose names end alike (``a-kv``, ``b-kv``)
ask each other. Pools compare their layout and model when they connect, so one with other blocks, or with another model,
is refused before anything is fetched.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvpool import _core
from kvpool.engines.membership import Membership
from kvpool.engines.remembered import Remembered
from kvpool.errors import ArgumentError, Error, LayoutMismatch, Unsupported
from kvpool.pool import Pool
from kvpool.transfer.key_fetch import KEYS_MAX, FetchControl, fetch_keys

__all__ = ["KEYS_MAX", "KeyedMembers", "cache_name"]

_log = logging.getLogger("kvpool.engines")

ASKED_MAX: Final = 8
"""Members that are asked at most. If there are more, it is the same ones for a while, and then others."""

ASK_SECONDS: Final = 0.05
"""In which a member must answer a look-up."""

_TURN_SECONDS: Final = 10.0  # for which the same members are asked
_FOUND_SECONDS: Final = 10.0  # for which loads ask a member at which a look-up found blocks, even out of its turn
_SILENT_SECONDS: Final = 2.0  # for which a member is not asked that was lost, was too slow, or has no such cache now
_OTHER_SECONDS: Final = 60.0  # and one whose blocks are others, or that is too old


def cache_name(part: str, epoch: int) -> str:
    """The name for peers of a cache that was cleared so often.

    Members find each other's blocks only in the same epoch. So one that was cleared for new weights never gets what
    another one, which is cleared later, has of the old ones.

    Args:
        part: What its blocks are, in the same words at each member.
        epoch: How often it was cleared.
    """
    return f"{part}/{epoch}" if epoch else part


class KeyedMembers:
    """What they have, and how it comes here. Thread-safe. Nothing that fails at a member raises: it is not there.

    Args:
        pool: A member of the cluster.
        cache: Of the pool, with a name.
        membership: The pool's; it is closed by `close`.
        ending: Of the names of the members to ask; "": all.
        fetch_seconds: For one fetch.
        clock: Seconds from any start.
    """

    def __init__(
        self,
        pool: Pool,
        cache: _core.KeyedCache,
        membership: Membership,
        ending: str,
        fetch_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._membership = membership
        self._ending = ending
        self._fetch_seconds = fetch_seconds
        self._clock = clock
        self._avoided = Remembered(clock)  # members that have failed
        self._found = Remembered(clock)  # members that had something: loads ask them
        self._fetches: set[FetchControl] = set()
        self._hurries = 0
        self._lock = threading.Lock()  # of these

    @property
    def name(self) -> str:
        """This member's."""
        return self._membership.name

    def asked(self) -> list[str]:
        """The members to ask now."""
        names = self._avoided.missing(self._like())
        if len(names) <= ASKED_MAX:
            return names
        turn = f"{self._clock() // _TURN_SECONDS} {self.name} "
        return sorted(names, key=lambda name: hashlib.sha256((turn + name).encode()).digest())[:ASKED_MAX]

    def ask(self, keys: Sequence[Any], hold: float) -> list[_core.PeerKeyMatch]:
        """Asks, and waits for nothing. A look-up has `ASK_SECONDS`. Close the matches, after `answer`.

        Args:
            keys: At most `KEYS_MAX`.
            hold: Seconds for which members keep what they find.
        """
        return self._pool.peers.match_keys(
            self.asked(), self._cache, list(keys), every=True, hold=hold, timeout=ASK_SECONDS, wait=False
        )

    def answer(self, match: _core.PeerKeyMatch) -> npt.NDArray[np.bool_] | None:
        """Which keys a member has; None if it has not said. Waits for the answer."""
        error = match.exception()
        if error is None:
            found = match.found
            if found.any():
                self._found.add(match.peer, _FOUND_SECONDS)
            return found
        self._avoid(match.peer, error)
        return None

    def find(self, keys: Sequence[Any]) -> npt.NDArray[np.bool_]:
        """Which of these keys other members have now. Nothing is held there."""
        parts = [self._find(keys[at : at + KEYS_MAX]) for at in range(0, len(keys), KEYS_MAX)]
        return np.concatenate([np.zeros(0, bool), *parts])

    def _find(self, keys: Sequence[Any]) -> npt.NDArray[np.bool_]:
        found = np.zeros(len(keys), bool)
        matches = self.ask(keys, ASK_SECONDS)
        try:
            for match in matches:
                there = self.answer(match)
                if there is not None:
                    found |= there
        finally:
            for match in matches:
                match.close()
        return found

    def bring(self, keys: Sequence[Any]) -> _core.KeyedMatch:
        """Fetches what is missing here and others have; pins what is here then, until the match is closed.

        Raises:
            OutOfBlocks: The cache has no room.
        """
        control = FetchControl(self._avoid)
        with self._lock:
            self._fetches.add(control)
            hurried = self._hurries > 0
        try:
            peers = [] if hurried else self._to_load_from()
            return fetch_keys(self._pool, self._cache, peers, list(keys), self._fetch_seconds, ASK_SECONDS, control)
        finally:
            with self._lock:
                self._fetches.discard(control)

    @contextmanager
    def hurry(self) -> Iterator[None]:
        """Meanwhile `bring` fetches nothing; fetches that are under way are cancelled."""
        with self._lock:
            self._hurries += 1
            fetches = list(self._fetches)
        for fetch in fetches:
            fetch.cancel()
        try:
            yield
        finally:
            with self._lock:
                self._hurries -= 1

    def use(self, cache: _core.KeyedCache) -> None:
        """A cache of the same name takes the place of the one before. REQUIRES: no other call is under way."""
        self._cache = cache

    def close(self) -> None:
        """Leaves the cluster. Idempotent."""
        self._membership.close()

    def _avoid(self, name: str, error: Exception) -> None:
        other = isinstance(error, LayoutMismatch | ArgumentError | Unsupported)
        if isinstance(error, LayoutMismatch):
            _log.warning("kvpool does not share blocks with %s: %s", name, error)
        elif not isinstance(error, Error):
            raise error
        self._avoided.add(name, _OTHER_SECONDS if other else _SILENT_SECONDS)

    def _to_load_from(self) -> list[str]:
        """The members to ask now, and those that look-ups before have found something at: their turn may be over."""
        asked = self.asked()
        late = self._found.names().difference(asked)
        return asked + self._avoided.missing(name for name in self._like() if name in late) if late else asked

    def _like(self) -> list[str]:
        """The other members that have the same part of the same pages, as far as their names say so."""
        return [name for name in self._membership.others() if name.endswith(self._ending)]
