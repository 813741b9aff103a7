"""Calls the application back with items that peers have sent."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvpool import _core
from kvpool._core import Received
from kvpool.errors import ClosedError, DeviceLost, Error, PeerLost
from kvpool.transfer.dispatcher import Dispatcher

__all__ = ["Received", "ReceivedCallback"]

_log = logging.getLogger("kvpool.received")


class ReceivedCallback(Dispatcher[Received]):
    """A callback of `Inbox.on_received`, until it is closed. It runs in a dedicated thread, one item after another.

    Use it in a ``with``, or call ``close()``; then items wait in the queue again. It also ends when the pool is closed,
    or when its GPU or a rank of its instance is lost: the logger "kvpool.received" says so.
    """

    def __init__(self, pool: _core.Pool, callback: Callable[[Received], object]) -> None:
        """Use `Inbox.on_received`."""
        super().__init__(pool, pool._received_fd(), callback, "kvpool-received")

    def _take(self, pool: _core.Pool) -> Received | None:
        try:
            return pool._receive(0)
        except (DeviceLost, PeerLost) as error:
            _log.error("nothing more is received: %s", error)
            raise ClosedError(str(error)) from error

    def _failed(self, item: Received) -> None:
        _log.exception("the callback for what %s sent has failed", item.peer, extra={"peer": item.peer})
        try:
            item.close()
        except Error:
            _log.exception("an item of %s could not be closed", item.peer, extra={"peer": item.peer})
