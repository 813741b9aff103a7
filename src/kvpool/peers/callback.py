"""Tells the application which peers join and are lost, and which blocks they recall."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvpool import _core
from kvpool.errors import Error
from kvpool.transfer.dispatcher import Dispatcher

__all__ = ["PeerCallback", "PeerEvent", "RecallResult"]

_log = logging.getLogger("kvpool.peers")


@dataclass(frozen=True)
class PeerEvent:
    """A peer has joined, was lost, or recalls blocks.

    Attributes:
        name: The peer's name.
        kind: "joined": it is connected, no matter which side called. "lost": it is no longer connected; transfers with
            it have failed. "recalled": it recalls blocks that it has lent to this pool. Free them, if necessary after
            fetching their content; at the deadline this pool loses them.
        instance: The number in the addresses of its blocks.
        incarnation: The number of this incarnation, which distinguishes a restarted peer from the lost one.
        error: For "lost", the reason, mostly a PeerLost; otherwise None.
        addrs: For "recalled", the blocks; otherwise empty.
        deadline: For "recalled", when the loan ends, by `time.monotonic()`; otherwise None.
    """

    name: str
    kind: Literal["joined", "lost", "recalled"]
    instance: int
    incarnation: int
    error: Error | None = None
    addrs: tuple[int, ...] = ()
    deadline: float | None = None


@dataclass(frozen=True)
class RecallResult:
    """How many blocks `Peers.recall` has got back.

    Attributes:
        returned: Given back, or inserted here, by the peer.
        freed: Taken back at the deadline and free: nothing can write to them.
        quarantined: Taken back at the deadline; they become free when the peer says, or it is proved, that it no longer
            writes them.
    """

    returned: int
    freed: int
    quarantined: int


class PeerCallback(Dispatcher[PeerEvent]):
    """A callback of `Peers.on_change`, until it is closed. It runs in a dedicated thread, one event after another.

    Use it in a ``with``, or call ``close()``; closing the pool ends it, too.
    """

    def __init__(self, pool: _core.Pool, callback: Callable[[PeerEvent], object]) -> None:
        """Use `Peers.on_change`."""
        self._pool = weakref.ref(pool)
        super().__init__(pool, pool._begin_peer_events(), callback, "kvpool-peers")

    def close(self) -> None:
        """Ends it: when this returns the callback no longer runs. Idempotent.

        If the callback itself calls this, that is its last run.
        """
        pool = self._pool()
        if pool is not None and not self.closed:
            with contextlib.suppress(Error):  # the pool is closed, or belongs to the parent process
                pool._end_peer_events()  # before another callback can begin
        super().close()

    def _take(self, pool: _core.Pool) -> PeerEvent | None:
        facts = pool._next_peer_event()
        if facts is None:
            return None
        event = PeerEvent(**facts)
        fields = {"peer": event.name, "instance": event.instance, "incarnation": event.incarnation}
        if event.kind == "joined":
            _log.info("%s has joined", event.name, extra=fields)
        elif event.kind == "lost":
            reason = type(event.error).__name__
            _log.warning("%s is lost: %s", event.name, event.error, extra=fields | {"reason": reason})
        else:
            count = len(event.addrs)
            _log.info("%s recalls %d blocks", event.name, count, extra=fields | {"blocks": count})
        return event

    def _failed(self, item: PeerEvent) -> None:
        _log.exception("the callback for %s, which %s, has failed", item.name, item.kind, extra={"peer": item.name})
