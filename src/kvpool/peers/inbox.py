"""What peers have sent for the application: `Pool.inbox`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvpool._core import Received
from kvpool.errors import ArgumentTypeError, ClosedError, StateError
from kvpool.peers.service import NetworkedPool
from kvpool.transfer.received import ReceivedCallback

__all__ = ["Inbox"]


class Inbox:
    """What peers have sent for the application. `Pool.inbox` makes it.

    An item is what a transfer without a prompt brought, whose blocks are the application's now, and what was sent with
    ``private`` bytes, also to blocks that the sender has borrowed (``lent``). Items come in the order in which
    transfers were completed, each once: to one caller, or to the callback of `on_received`. Keeps its pool.

    Iterating waits for each next item, and ends when the pool is closed:

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
            timeout: Seconds; None: the setting ``timeout_s``. 0 looks without waiting.

        Returns:
            A Received, or None when nothing came in time.

        Raises:
            ClosedError: The pool was closed.
            DeviceLost, PeerLost: Its GPU, or a rank of its instance, was lost, and with it every block; and nothing
                waits.
            StateError: The pool has no peers yet: call listen or connect first.
        """
        return self._pool._receive(timeout)

    def on_received(self, callback: Callable[[Received], object]) -> ReceivedCallback:
        """Calls back for each item that `receive` would return, in a thread that the pool keeps for it.

        An item that the callback does not keep is closed when it returns. An exception goes to the logger
        "kvpool.received", and the item is closed. One callback at a time.

        Args:
            callback: Takes a Received. It should be quick: items wait meanwhile, and when too many wait, peers are told
                Busy.

        Returns:
            A handle whose close() ends it.

        Raises:
            StateError: There is a callback already; or the pool has no peers yet.
        """
        if not callable(callback):
            raise ArgumentTypeError(f"callback must be callable, and is {type(callback).__name__}")
        pool = self._pool
        with pool._serving:
            if pool._received_callback is not None and not pool._received_callback.closed:
                raise StateError("there is a callback already: close it first")
            pool._received_callback = ReceivedCallback(pool, callback)
            return pool._received_callback

    def __iter__(self) -> Iterator[Received]:
        """Over the items that come, until the pool is closed. Raises what `receive` raises but ClosedError."""
        while True:
            try:
                item = self._pool._receive(None)
            except ClosedError:
                return
            if item is not None:
                yield item
