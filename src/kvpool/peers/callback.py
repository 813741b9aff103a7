"""Telling the application which peers come and go, and which blocks they want back."""

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
    """A peer has come or gone, or wants blocks back.

    Attributes:
        name: What it calls itself.
        kind: "joined": it is connected, whoever called. "lost": it is not any more; transfers with it have failed.
            "recalled": it wants blocks back that it has lent to this pool. Free them, after fetching what they hold if
            that is needed; at the deadline they are lost for this pool.
        instance: The number in the addresses of its blocks.
        incarnation: Number of this incarnation: tells a peer that was restarted from the one that was lost.
        error: Of one that was lost: why, mostly a PeerLost. None for the others.
        addrs: Of a recall: the blocks. Empty for the others.
        deadline: Of a recall: until when they are lent, as `time.monotonic()` tells it. None for the others.
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
    """What has become of the blocks that `Peers.recall` has asked for.

    Attributes:
        returned: The peer gave them back, or inserted them here.
        freed: They were taken back at the deadline, and are free: nobody can write them any more.
        quarantined: They were taken back, and are free when the peer says, or is proved, to write them no more.
    """

    returned: int
    freed: int
    quarantined: int


class PeerCallback(Dispatcher[PeerEvent]):
    """A callback of `Peers.on_change`, until it is closed. It runs in a thread of its own, one event after another.

    Use it in a ``with``, or call ``close()``; closing the pool ends it, too.
    """

    def __init__(self, pool: _core.Pool, callback: Callable[[PeerEvent], object]) -> None:
        """Use `Peers.on_change`."""
        self._pool = weakref.ref(pool)
        super().__init__(pool, pool._begin_peer_events(), callback, "kvpool-peers")

    def close(self) -> None:
        """Ends it: when this returns the callback is not running any more. Idempotent.

        The callback itself may call this; then it is the last time that it runs.
        """
        pool = self._pool()
        if pool is not None and not self.closed:
            with contextlib.suppress(Error):  # the pool is closed, or a parent process's
                pool._end_peer_events()  # before anybody can begin again
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
