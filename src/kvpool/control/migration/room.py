"""Room for a request that arrives: a pinned prefix and blocks behind it; and what fetches may take of the links."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvpool._core import Match
from kvpool.errors import ClosedError, DeviceLost, PeerLost, StaleAddress, StateError
from kvpool.policy import migration as policy
from kvpool.policy.migration.messages import Addresses
from kvpool.pool import Pool
from kvpool.types import HBM, Medium

__all__ = ["Budget", "Room", "make_room"]

_PIECE_BYTES: Final = 16 << 20  # a foreground transfer, or the stop, waits for no more than one piece
_PIECE_S: Final = 0.05
_POOL_IS_LOST: Final = (
    ClosedError,
    DeviceLost,
    PeerLost,
)  # with all of its blocks: closed, or its GPU or a rank is lost


@dataclass
class Room:
    """The blocks of a request that arrives: a pinned prefix, and behind it blocks that were allocated for it.

    Attributes:
        pool: Where they are.
        medium: Of them.
        prefix: The pin.
        own: Allocated for it.
    """

    pool: Pool
    medium: Medium
    prefix: Match
    own: Addresses
    _aside: Addresses = field(default_factory=lambda: np.empty(0, np.uint64))

    @property
    def blocks(self) -> Addresses:
        """All, in order."""
        return np.concatenate([self.prefix.addrs, self.own])

    def grow(self, blocks: int) -> None:
        """Makes room for so many blocks in all. Raises OutOfBlocks, and changes nothing then."""
        missing = blocks - len(self.prefix.addrs) - len(self.own)
        if missing > 0:
            self.own = np.concatenate([self.own, self.pool.alloc(missing, self.medium)])

    def set_aside(self, first: int, last: int) -> None:
        """Takes these blocks out, to which a fetch that has failed may still write. `free_aside` frees them."""
        begin, end = first - len(self.prefix.addrs), last - len(self.prefix.addrs)
        self._aside = np.concatenate([self._aside, self.own[begin:end]])
        self.own = np.concatenate([self.own[:begin], self.own[end:]])

    def free_aside(self) -> bool:
        """Frees what can be freed of the blocks that were set aside. Whether that is all: else call it again."""
        self._aside = _free(self.pool, self._aside)
        return not len(self._aside)

    def give_up(self) -> bool:
        """Unpins the prefix, and frees what can be freed. Whether that is all.

        The blocks of a fetch that has failed are quarantined while the source may still write to them, and ours or free
        afterwards: call it again then.
        """
        self.prefix.close()
        self.own = _free(self.pool, self.own)
        return not len(self.own)


def _free(pool: Pool, addrs: Addresses) -> Addresses:
    """Frees blocks, and returns those that are quarantined. After a quarantine some may be free already."""
    if not len(addrs):
        return addrs
    try:
        pool.free(addrs)
    except _POOL_IS_LOST:
        pass
    except (StateError, StaleAddress) as error:  # of some: then none was freed
        if len(addrs) == 1:
            return addrs if isinstance(error, StateError) else addrs[:0]
        half = len(addrs) // 2
        return np.concatenate([_free(pool, addrs[:half]), _free(pool, addrs[half:])])
    return addrs[:0]


def make_room(pool: Pool, medium: Medium, offer: policy.SourceSays) -> Room:
    """Pins what is cached of a request, and allocates for the rest: all or nothing. Raises OutOfBlocks."""
    size = pool.kv_layout.block_tokens
    full = offer.whole // size * size
    prefix = pool.match(offer.tokens[:full], offer.namespace, into=HBM if medium == HBM else None)
    try:
        missing = -(-max(offer.room, len(offer.tokens)) // size) - len(prefix.addrs)
        own = pool.alloc(missing, medium) if missing > 0 else np.empty(0, np.uint64)
    except BaseException:
        prefix.close()
        raise
    return Room(pool, medium, prefix, own)


class Budget:
    """What fetches of rounds may take of the links to this pool: shared by all requests that arrive. Thread-safe.

    Attributes:
        piece_bytes: So much is fetched at a time.

    Args:
        bytes_per_s: Of all rounds together; None: no bound.
    """

    def __init__(self, bytes_per_s: float | None) -> None:
        self._pace = policy.Pace(bytes_per_s)
        self._lock = threading.Lock()
        self.piece_bytes = _PIECE_BYTES if bytes_per_s is None else min(_PIECE_BYTES, int(_PIECE_S * bytes_per_s))

    def take(self, n_bytes: int) -> float:
        """Takes so many bytes of the budget; seconds to wait before they are moved."""
        with self._lock:
            return self._pace.wait_s(n_bytes, time.monotonic())
