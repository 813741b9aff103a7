"""The peers of a pool: `Pool.peers`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

import numpy as np

from kvpool import _core
from kvpool.arguments import flag_from, int_from
from kvpool.errors import ArgumentTypeError, StateError
from kvpool.peers.callback import PeerCallback, PeerEvent, RecallResult
from kvpool.peers.info import PeerInfo
from kvpool.peers.service import NetworkedPool
from kvpool.types import TransferTotals

__all__ = ["Peers"]

_log = logging.getLogger("kvpool.peers")

_RECALL_MAX: Final = 1 << 19  # blocks in one call

_Infos: TypeAlias = list[PeerInfo]  # in the class the name `list` is the method


class Peers:
    """The peers of a pool: meeting them, parting from them, and who is connected. `Pool.peers` makes it.

    Iterate over it for a PeerInfo of each peer that is connected now. Keeps its pool.
    """

    __slots__ = ("_pool",)

    def __init__(self, pool: NetworkedPool) -> None:
        """Use `Pool.peers`."""
        self._pool = pool

    @property
    def name(self) -> str | None:
        """What peers call this pool: the setting ``name``. None before the first listen, connect or attach."""
        return self._pool._name()

    def listen(self, address: str = "tcp:127.0.0.1:0") -> str:
        """Lets peers connect. May be called for several addresses.

        Peers know the pool by the setting ``name``, and prove that they know its setting ``secret``. Over a Unix socket
        without a secret, only processes of the same user get in.

        Args:
            address: "unix:/path"; "unix:@name", which leaves no file; "tcp:HOST:PORT", port 0 for any that is free. TCP
                needs a secret.

        Returns:
            The address to connect to, with the port that was given.

        Raises:
            ArgumentError: It is not an address; or it is TCP, and the pool has no secret.
            StateError: The address is in use. A listen that fails leaves the pool as it was.
        """
        pool = self._pool
        _core._check_listen_address(address, bool(pool.settings.secret))
        with pool._speaking():
            bound = pool._listen(address)
        _log.info("listening at %s", bound, extra={"address": bound})
        return bound

    def connect(self, address: str, *, timeout: float | None = None, wait: bool = True) -> str:
        """Meets the pool that listens at an address. Either side can send to the other then.

        As long as nobody listens there it tries again, so that two processes may be started in any order. A wrong
        secret, version or layout fails at once. Both sides may connect to each other: one connection stays. Ctrl-C
        ends the wait. A pool of this host that listens on TCP is met over its Unix socket (setting
        ``prefer_unix_socket``). Releases the GIL.

        All or nothing: a connect that fails leaves the pool as it was.

        Args:
            address: What its listen returned.
            timeout: Seconds; None: the setting ``timeout_s``.
            wait: False: fail at once when nobody listens.

        Returns:
            The peer's name, for the verbs that take a peer; also when it was connected already.

        Raises:
            PeerLost: Nobody listens there. Or the peer is on this host, and its Unix socket refuses.
            AuthError: The secrets differ.
            ProtocolError: It is no kvpool, or none that speaks our version.
            LayoutMismatch: Its blocks have another shape, or hold the cache of another model.
            DeadlineExceeded: It did not answer in time; the message says whether it was the address or the Unix socket.
            Busy: Writes of an earlier connection to it are not over.
            StateError: The peer has not noticed yet that an earlier connection has ended.
        """
        pool = self._pool
        _core._check_connect_address(address, bool(pool.settings.secret))
        wait = flag_from(wait, "wait")
        with pool._speaking():
            peer = pool._connect(address, timeout, wait)
        _log.info("met %s at %s", peer, address, extra={"peer": peer, "address": address})
        return peer

    def disconnect(self, peer: str) -> None:
        """Parts from a peer.

        Transfers with it that are under way end with PeerLost on both sides; blocks that it had lent are given back,
        and those that it borrowed or reserved are free again as soon as it can write to them no more. Ctrl-C ends the
        wait for that. Releases the GIL.

        Args:
            peer: Its name.

        Raises:
            PeerLost: There is no such peer.
        """
        self._pool._disconnect(peer)

    def recall(self, peer: str, blocks: object = None, *, timeout: float | None = None) -> RecallResult:
        """Asks a peer for blocks back that are lent to it, and takes at the deadline what it has not given back.

        The peer's application hears of it (a "recalled" event of its `on_change`) and may use the blocks until the
        deadline. From then on they are not its own any more: its transfers to them end with StaleAddress, and so does
        whatever names them. A peer that is stopped, or does not care, delays nothing: blocks that this process writes
        for it (``sock``) are free at the deadline, those that it writes by itself are quarantined until it says that it
        does so no more, or is proved to be gone. Returns as soon as all are back. Ctrl-C ends the wait, not the recall.
        Releases the GIL.

        Args:
            peer: Its name.
            blocks: Their addresses; or how many of them, whichever; None: all.
            timeout: Seconds until the deadline; None: the setting ``timeout_s``.

        Returns:
            How many came back, were freed at the deadline, and are quarantined.

        Raises:
            PeerLost: There is no such peer, or it was lost meanwhile: then what was lent is treated as a lost peer's.
            NotOwner: A block is not lent to this peer.
            ArgumentError: A block stands twice in the list; more than 524,288 blocks.
            Busy: The peer takes messages too slowly, or is asked for too much at once; nothing has changed.
        """
        if blocks is None or isinstance(blocks, int | np.integer):
            count = _RECALL_MAX if blocks is None else int_from(blocks, "blocks")
            return RecallResult(**self._pool._recall(peer, None, count, timeout))
        return RecallResult(**self._pool._recall(peer, blocks, 0, timeout))

    def list(self) -> _Infos:
        """A PeerInfo of each peer that is connected now; those of a cluster that no verb has named yet are not."""
        pool = self._pool
        return [PeerInfo.of(facts) for facts in pool._peers()] if pool._name() is not None else []

    def totals(self) -> dict[str, TransferTotals]:
        """How the transfers ended that this pool has begun: "send" (transfer and its like) and "fetch".

        Empty before it has met a peer. What peers send or fetch by themselves counts there.
        """
        pool = self._pool
        if pool._name() is None:
            return {}
        return {kind: TransferTotals(**totals) for kind, totals in pool._transfer_totals().items()}

    def on_change(self, callback: Callable[[PeerEvent], object]) -> PeerCallback:
        """Calls back when a peer joins, is lost or recalls blocks, in a thread that the pool keeps for it.

        First comes a "joined" for each peer that is connected now, so that none is missed. Events come in order, one at
        a time. What becomes of a connection that both sides made at once, or of a peer that replaces itself, is one
        story: "lost" always follows "joined" of the same incarnation. An exception goes to the logger "kvpool.peers".

        Args:
            callback: Takes a PeerEvent.

        Returns:
            A handle whose close() ends it.

        Raises:
            StateError: There is a callback already; or the pool has no peers yet: call listen or connect first.
        """
        if not callable(callback):
            raise ArgumentTypeError(f"callback must be callable, and is {type(callback).__name__}")
        pool = self._pool
        with pool._serving:
            if pool._peer_callback is not None and not pool._peer_callback.closed:
                raise StateError("there is a callback already: close it first")
            pool._peer_callback = PeerCallback(pool, callback)
            return pool._peer_callback

    def __iter__(self) -> Iterator[PeerInfo]:
        """Over what `list` returns."""
        return iter(self.list())

    def __repr__(self) -> str:
        """Who is connected."""
        return f"<Peers {', '.join(peer.name for peer in self) or 'none'}>"
