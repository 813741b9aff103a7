"""The items that peers have sent for the application: `Pool.inbox`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from kvpool._core import Received
from kvpool.errors import ClosedError
from kvpool.peers.service import NetworkedPool
from kvpool.transfer.received import ReceivedCallback

__all__ = ["Inbox"]


class Inbox:
    """The items that peers have sent for the application. `Pool.inbox` makes it.

    A transfer makes an item if it has no prompt, so that the application gets its blocks, or if it has ``private``
    bytes, also if it writes blocks that the sender has borrowed (``lent``). Items come in the order in which transfers
    were completed. Each item goes once to one caller, or to the callback of `on_received`. Keeps its pool alive.

    Iterating waits for the next item, and ends when the pool is closed:

        for item in pool.inbox:
            with item:
                ...
    """

    __slots__ = ("_pool",)

    def __init__(self, pool: NetworkedPool) -> None:
        """Use `Pool.inbox`."""
        self._pool = pool

    def receive(self, timeout: float | None = None) -> Received | None:
        """The next item. Ctrl-C ends the wait. Releases the GIL.

        Args:
            timeout: Seconds; None: the setting ``timeout_s``. 0 does not wait.

        Returns:
            A Received, or None when nothing came in time.

        Raises:
            ClosedError: The pool was closed.
            DeviceLost, PeerLost: No item waits, and the pool's GPU, or a rank of its instance, was lost, and with it
                every block.
            StateError: The pool has no peers yet: call listen or connect first.
        """
        return self._pool._receive(timeout)

    def on_received(self, callback: Callable[[Received], object]) -> ReceivedCallback:
        """Calls back, in a dedicated thread, for each item that `receive` would return.

        An item that the callback does not keep is closed when it returns. An exception goes to the logger
        "kvpool.received", and the item is closed. One callback at a time.

        Args:
            callback: Takes a Received. It should be quick: items wait meanwhile, and when too many wait, peers get
                Busy.

        Returns:
            A handle whose close() ends the callback.

        Raises:
            ArgumentTypeError: The callback is not callable.
            StateError: There is a callback already; or the pool has no peers yet.
        """
        pool = self._pool
        return pool._received_callback.begin(functools.partial(ReceivedCallback, pool), callback)

    def __iter__(self) -> Iterator[Received]:
        """Iterates over arriving items until the pool is closed. Raises what `receive` raises except ClosedError."""
        while True:
            try:
                item = self._pool._receive(None)
            except ClosedError:
                return
            if item is not None:
                yield item
