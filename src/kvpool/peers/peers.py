"""The peers of a pool: `Pool.peers`."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpool.arguments import flag_from, int_from
from kvpool.errors import ArgumentError, StateError
from kvpool.peers.addresses import check_connect, check_listen
from kvpool.peers.caches import PeerCaches
from kvpool.peers.callback import PeerCallback, PeerEvent, RecallResult
from kvpool.peers.info import PeerInfo
from kvpool.types import TransferTotals
from kvpool.types.addresses import AddressLike, with_instance

__all__ = ["Peers"]

_log = logging.getLogger("kvpool.peers")

_RECALL_MAX: Final = 1 << 19  # blocks in one call

_Infos: TypeAlias = list[PeerInfo]  # in the class the name `list` is the method


class Peers(PeerCaches):
    """Connects to peers, disconnects them, and lists them. `Pool.peers` makes it.

    Iterate over it for a PeerInfo of each connected peer. Keeps its pool alive.
    """

    __slots__ = ()

    @property
    def name(self) -> str | None:
        """The pool's name among its peers: the setting ``name``. None before the first listen, connect or attach."""
        return self._pool._name()

    @property
    def lend_max(self) -> int | None:
        """How many blocks may be lent at a time, of all media and to all peers; None: no limit.

        It begins with the setting ``lend_max``. A peer that would get more, gets Busy. What is lent above a new limit
        stays lent: `recall` asks for it.

        Raises:
            ArgumentError: Set to a number below 0.
            ArgumentTypeError: Set to what is neither an int nor None.
            ClosedError: Set in a closed pool.
        """
        limit = self._pool._lend_max
        return None if limit < 0 else limit

    @lend_max.setter
    def lend_max(self, blocks: int | None) -> None:
        limit = -1 if blocks is None else int_from(blocks, "lend_max")
        if blocks is not None and limit < 0:
            raise ArgumentError(f"lend_max is {limit}; it must be 0 or more, or None", value=limit)
        self._pool._lend_max = min(limit, 1 << 40)

    def listen(self, address: str = "tcp:127.0.0.1:0") -> str:
        """Lets peers connect. May be called for several addresses.

        Peers know the pool by the setting ``name``, and prove that they know its setting ``secret``. Over a Unix socket
        without a secret, only processes of the same user are admitted.

        Args:
            address: "unix:/path"; "unix:@name", which leaves no file; "tcp:HOST:PORT", port 0 for any free port. TCP
                needs a secret.

        Returns:
            The address to connect to, with the actual port.

        Raises:
            ArgumentError: It is not an address; or it is TCP, and the pool has no secret.
            StateError: The address is in use. A listen that fails leaves the pool as it was.
        """
        pool = self._pool
        check_listen(address, bool(pool.settings.secret))
        with pool._speaking():
            bound = pool._listen(address)
        _log.info("listening at %s", bound, extra={"address": bound})
        return bound

    def connect(self, address: str, *, timeout: float | None = None, wait: bool = True) -> str:
        """Connects to the pool that listens at an address. Then either side can send to the other.

        Retries while nothing listens there, so two processes may be started in any order. A wrong secret, version or
        layout fails at once. Both sides may connect to each other: one connection stays. Ctrl-C ends the wait. Connects
        to a pool on this host that listens on TCP over its Unix socket (setting ``prefer_unix_socket``). Releases the
        GIL.

        All or nothing: a connect that fails leaves the pool as it was.

        Args:
            address: The result of its listen.
            timeout: Seconds; None: the setting ``timeout_s``.
            wait: False: fail at once when nothing listens.

        Returns:
            The peer's name, for the verbs that take a peer; also when it was connected already.

        Raises:
            PeerLost: Nothing listens there. Or the peer is on this host, and its Unix socket refuses.
            AuthError: The secrets differ.
            ProtocolError: It is no kvpool, or has no protocol version in common with this one.
            LayoutMismatch: Its blocks have another shape, or belong to another model.
            DeadlineExceeded: It did not answer in time; the message says whether at the address or the Unix socket.
            Busy: Writes of an earlier connection to it have not ended.
            StateError: The peer has not noticed yet that an earlier connection has ended.
        """
        pool = self._pool
        check_connect(address, bool(pool.settings.secret))
        wait = flag_from(wait, "wait")
        with pool._speaking():
            peer = pool._connect(address, timeout, wait)
        _log.info("connected to %s at %s", peer, address, extra={"peer": peer, "address": address})
        return peer

    def disconnect(self, peer: str) -> None:
        """Disconnects a peer.

        Transfers in progress with it end with PeerLost on both sides. Blocks that it had lent are given back; blocks
        that were lent to it or reserved for it become free as soon as it can no longer write to them. Ctrl-C ends the
        wait for that. Releases the GIL.

        Args:
            peer: Its name.

        Raises:
            PeerLost: There is no such peer.
        """
        self._pool._disconnect(peer)

    def lend(self, peer: str, addrs: AddressLike, *, timeout: float | None = None) -> None:
        """Lends blocks of an engine to a peer, which may write into them until the loan ends.

        For blocks that the caller has adopted in a pool with ``engine_allocates``. The peer names them as destinations
        of its transfers (``to=``); tell its application their addresses, as `addresses` gives them. A transfer with
        ``private`` tells this pool's `inbox` when its content is there. The loan ends when the peer frees the blocks or
        is lost, or by `recall`; then they are active again, or quarantined as long as the peer may still write. While
        they are lent they can be neither freed nor adopted, so the engine must not use them. These loans do not count
        for `lend_max`. Any thread may call. Releases the GIL.

        All or nothing: after a failure the loan is over, or will be as soon as the peer hears of it.

        Args:
            peer: Its name, as in `Pool.transfer`.
            addrs: Active blocks of this pool that an engine allocates; at most 524,288.
            timeout: Seconds for the peer's answer; None: the setting ``timeout_s``.

        Raises:
            StateError: A block is not active, is being read, or is not allocated by an engine.
            StaleAddress, NotOwner: An address names no block of this pool.
            ArgumentError: No blocks, too many, or one twice.
            Busy: The peer has not ended a write of an earlier loan of one of them, or has not answered a recall of it,
                also after its deadline; or it has its limit of blocks here, or too many calls are under way.
            PeerLost, DeadlineExceeded: It is gone, or has not answered.
        """
        self._pool._lend(peer, addrs, timeout)

    def recall(self, peer: str, blocks: object = None, *, timeout: float | None = None) -> RecallResult:
        """Asks a peer to give back blocks that are lent to it, and at the deadline takes those that it has not.

        The peer's application is notified (a "recalled" event of its `on_change`) and may use the blocks until the
        deadline. After that, its transfers to them, and calls that name them, fail with StaleAddress. A peer that is
        stopped or does not react delays nothing: blocks that this process writes for it (``sock``) are free at the
        deadline; blocks that it writes by itself are quarantined until it says that it no longer does, or is proved to
        be gone. Returns as soon as all are back. Ctrl-C ends the wait, not the recall. Releases the GIL.

        Args:
            peer: Its name.
            blocks: Their addresses; or a number of any blocks; None: all.
            timeout: Seconds until the deadline; None: the setting ``timeout_s``.

        Returns:
            How many came back, were freed at the deadline, and are quarantined.

        Raises:
            PeerLost: There is no such peer, or it was lost meanwhile: then its blocks are treated as a lost peer's.
            NotOwner: A block is not lent to this peer.
            ArgumentError: Duplicate blocks; more than 524,288 blocks.
            Busy: The peer takes messages too slowly, or too many recalls are under way; nothing has changed.
        """
        if blocks is None or isinstance(blocks, int | np.integer):
            count = _RECALL_MAX if blocks is None else int_from(blocks, "blocks")
            return RecallResult(**self._pool._recall(peer, None, count, timeout))
        return RecallResult(**self._pool._recall(peer, blocks, 0, timeout))

    def list(self) -> _Infos:
        """A PeerInfo of each connected peer. Members of a cluster connect when a verb first names them."""
        pool = self._pool
        return [PeerInfo.of(facts) for facts in pool._peers()] if pool._name() is not None else []

    def addresses(self, addrs: AddressLike) -> npt.NDArray[np.uint64]:
        """Addresses of this pool's blocks as peers may use them.

        What a pool gave out before its first listen, connect or attach names no instance: it stays valid here, and
        peers refuse it (NotOwner). What it gives out later is returned as it is. Whether a block is still at its
        address is not checked: who uses it learns that.

        Args:
            addrs: Addresses of this pool.

        Returns:
            As many addresses.

        Raises:
            NotOwner: An address is of another instance.
            StateError: The pool has no peers yet.
            ArgumentError, ArgumentTypeError: These are no addresses.
        """
        pool = self._pool
        if pool._name() is None:
            raise StateError("this pool has no peers yet: call listen, connect or attach first")
        return with_instance(addrs, pool._instance())

    def totals(self) -> dict[str, TransferTotals]:
        """Counts the outcomes of transfers that this pool has begun: "send" (transfer and the like) and "fetch".

        Empty before the first listen, connect or attach. Transfers that peers begin count at those peers.
        """
        pool = self._pool
        if pool._name() is None:
            return {}
        return {kind: TransferTotals(**totals) for kind, totals in pool._transfer_totals().items()}

    def on_change(self, callback: Callable[[PeerEvent], object]) -> PeerCallback:
        """Calls back, in a dedicated thread, when a peer joins, is lost or recalls blocks.

        The first events are a "joined" for each connected peer, so that none is missed. Events come in order, one at a
        time. Connections that both sides make at once, and peers that reconnect, do not disturb this order: "lost"
        always follows "joined" of the same incarnation. An exception goes to the logger "kvpool.peers".

        Args:
            callback: Takes a PeerEvent.

        Returns:
            A handle whose close() ends the callback.

        Raises:
            ArgumentTypeError: The callback is not callable.
            StateError: There is a callback already; or the pool has no peers yet: call listen or connect first.
        """
        pool = self._pool
        return pool._peer_callback.begin(functools.partial(PeerCallback, pool), callback)

    def __iter__(self) -> Iterator[PeerInfo]:
        """Iterates over the result of `list`."""
        return iter(self.list())

    def __repr__(self) -> str:
        """The names of the connected peers."""
        return f"<Peers {', '.join(peer.name for peer in self) or 'none'}>"
