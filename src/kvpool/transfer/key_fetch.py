"""Blocks that other pools have under keys: asked for, fetched into a keyed cache of this pool, and stored there.

All that fails at a peer, or takes too long there, is a miss. A block is stored when all of it has come, or not at all.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from kvpool import _core
from kvpool.errors import Cancelled, DeadlineExceeded, Error, OutOfBlocks
from kvpool.transfer.peer_match import ask_each
from kvpool.types import Keys

__all__ = ["KEYS_MAX", "FetchControl", "fetch_keys"]

_log = logging.getLogger("kvpool.peers")

KEYS_MAX: Final = 8192
"""Keys that a peer takes in one question."""

_SECONDS_MIN = 0.001  # for a fetch that begins at the deadline


class FetchControl:
    """Cancels a fetch from another thread, and hears which peers failed. Thread-safe.

    Args:
        failed: Called by the fetching thread with a peer's name, and why it sent nothing.
    """

    def __init__(self, failed: Callable[[str, Exception], None] | None = None) -> None:
        self._failed = failed
        self._transfers: list[_core.Transfer] = []
        self._questions: list[_core.PeerKeyMatch] = []
        self._cancelled = False
        self._lock = threading.Lock()

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled

    def cancel(self) -> None:
        """Nobody is asked any more, and nothing is fetched. Blocks that have come are stored."""
        with self._lock:
            self._cancelled = True
            questions, transfers = self._questions, list(self._transfers)
        for question in questions:
            question.close()
        for transfer in transfers:
            transfer.cancel()

    def asking(self, questions: list[_core.PeerKeyMatch]) -> None:
        """These take the place of those before. Closes them, too, if `cancel` was called."""
        with self._lock:
            self._questions = questions
            cancelled = self._cancelled
        if cancelled:
            for question in questions:
                question.close()

    def begun(self, transfer: _core.Transfer) -> None:
        """Cancels it, too, if `cancel` was called."""
        with self._lock:
            self._transfers.append(transfer)
            cancelled = self._cancelled
        if cancelled:
            transfer.cancel()

    def failed(self, peer: str, error: Exception, hurried: bool) -> None:
        """A peer sent nothing. That is not its fault if `cancel` may be why, or if it was given too little time.

        Args:
            peer: Its name.
            error: Why.
            hurried: It had less time than it has for an answer, because the fetch was about to end.
        """
        _log.info("blocks of %s were not fetched: %s", peer, error)
        excused = self._cancelled or isinstance(error, Cancelled) or (hurried and isinstance(error, DeadlineExceeded))
        if self._failed is not None and not excused:
            self._failed(peer, error)


def fetch_keys(
    pool: _core.Pool,
    cache: _core.KeyedCache,
    peers: Sequence[str],
    keys: Keys,
    timeout: float,
    ask_timeout: float,
    control: FetchControl | None = None,
) -> _core.KeyedMatch:
    """See `Peers.fetch_keys`."""
    until = time.monotonic() + timeout
    rows = _core._key_rows(keys, cache.key_bytes)
    here = cache.match(rows, every=True)  # so that what comes does not evict what is here
    missing = rows[~here.found]
    if not len(missing) or not peers:
        return here
    control = control or FetchControl()
    try:
        for first in range(0, len(missing), KEYS_MAX):
            left = until - time.monotonic() if first else timeout  # the first part is asked for in any case
            if left <= 0 or not peers or control.cancelled:
                break
            part = missing[first : first + KEYS_MAX]
            peers = _fetch_part(pool, cache, part, peers, left, ask_timeout, control)
        return cache.match(rows, every=True)
    finally:
        here.close()


def _fetch_part(
    pool: _core.Pool,
    cache: _core.KeyedCache,
    keys: npt.NDArray[np.uint8],
    peers: Sequence[str],
    left: float,
    ask_timeout: float,
    control: FetchControl,
) -> list[str]:
    """Asks for as many keys as one question has, and fetches, in the seconds that are left.

    Returns:
        The peers that answered.
    """
    until = time.monotonic() + left
    ask = min(ask_timeout, left)
    matches = ask_each(lambda peer: pool._match_keys_at(peer, cache, keys, True, left, ask), peers, wait=False)
    try:
        control.asking(matches)
        answered = _answers(matches, control, ask < ask_timeout)
        _bring(pool, cache, keys, answered, until, ask_timeout, control)
        return [match.peer for match in answered]
    finally:
        for match in matches:
            match.close()


def _answers(matches: Sequence[_core.PeerKeyMatch], control: FetchControl, hurried: bool) -> list[_core.PeerKeyMatch]:
    """Waits for each; those that have an answer."""
    answered = []
    for match in matches:
        failure = match.exception()
        if failure is None:
            answered.append(match)
        else:
            control.failed(match.peer, failure, hurried)
    return answered


@dataclass
class _Share:
    """Blocks that are being filled, and the fetch from one peer that fills them."""

    peer: str
    fill: _core.KeyedFill
    transfers: list[_core.Transfer] = field(default_factory=list)  # at most one
    hurried: bool = False  # it had less time than a question has


def _bring(
    pool: _core.Pool,
    cache: _core.KeyedCache,
    keys: npt.NDArray[np.uint8],
    answered: Sequence[_core.PeerKeyMatch],
    until: float,
    ask_timeout: float,
    control: FetchControl,
) -> None:
    """Fetches from all peers at once, each key from one of those that have it."""
    shares: list[_Share] = []
    full: OutOfBlocks | None = None
    try:
        for match, chosen, addrs in _divided(len(keys), answered):
            done, size = 0, len(chosen)
            while done < len(chosen) and size:
                part = slice(done, done + size)
                try:
                    shares.append(_Share(match.peer, cache._fill(keys[chosen[part]])))
                except OutOfBlocks as error:  # the beginning of it may have room
                    full, size = error, size // 2
                    continue
                _begin(pool, shares[-1], addrs[part], until, ask_timeout, control)
                done += size
                size = min(size, len(chosen) - done)
        for share in shares:
            for transfer in share.transfers:
                failure = transfer.exception()  # waits, at most until the transfer's deadline
                if failure is None:
                    share.fill.commit()
                else:
                    control.failed(share.peer, failure, share.hurried)
    finally:
        _end(shares)
    if full is not None:
        try:
            raise full
        finally:
            del full  # it would keep this frame, and so the fills


def _divided(
    n: int, answered: Sequence[_core.PeerKeyMatch]
) -> list[tuple[_core.PeerKeyMatch, npt.NDArray[np.intp], npt.NDArray[np.uint64]]]:
    """For each peer the keys that it is to send, and its addresses of them. Who has most sends most: few fetches."""
    wanted = np.ones(n, bool)
    divided = []
    for match in sorted(answered, key=lambda one: -len(one.addrs)):
        found = match.found
        chosen = np.flatnonzero(found & wanted)
        if len(chosen):
            wanted[chosen] = False
            divided.append((match, chosen, match.addrs[np.cumsum(found)[chosen] - 1]))
    return divided


def _begin(
    pool: _core.Pool,
    share: _Share,
    addrs: npt.NDArray[np.uint64],
    until: float,
    ask_timeout: float,
    control: FetchControl,
) -> None:
    """Begins the fetch of what was not stored here meanwhile; leaves it out if it cannot begin."""
    positions = share.fill.positions
    if not len(positions):
        return
    left = max(until - time.monotonic(), _SECONDS_MIN)
    share.hurried = left < ask_timeout
    fetch = functools.partial(pool.fetch, share.peer, to=share.fill.addrs, timeout=left)
    try:
        # One call of C: no signal's handler raises between the begin of the transfer and its entry in the list.
        share.transfers.extend(map(fetch, [addrs[positions]]))
        control.begun(share.transfers[0])
    except Error as error:
        control.failed(share.peer, error, share.hurried)


def _end(shares: Iterable[_Share]) -> None:
    """Gives the blocks back when nobody writes them: by the deadline of the fetches.

    What signals' handlers raise meanwhile is raised at the end: each time all goes on from where it was.
    """
    left = list(shares)
    raised: BaseException | None = None
    while left:
        try:
            for share in left:
                for transfer in share.transfers:
                    with contextlib.suppress(Error):  # in a fork: it is the parent's
                        transfer.cancel()
            while left:
                for transfer in left[-1].transfers:
                    _await_end(transfer)
                left[-1].fill.close()
                left.pop()
        except BaseException as error:
            raised = error
    if raised is not None:
        try:
            raise raised
        finally:
            del raised  # it would keep this frame


def _await_end(transfer: _core.Transfer) -> None:
    try:
        while not transfer.done():
            transfer.exception()
    except Error:  # as above
        return
