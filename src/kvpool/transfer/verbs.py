"""The verbs of a pool that need peers, as far as they are written in Python."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import secrets
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvpool import _core
from kvpool.arguments import flag_from, int_from, shown
from kvpool.config import Settings
from kvpool.errors import ArgumentError, ArgumentTypeError, DeadlineExceeded, Error, StateError
from kvpool.transfer.gpu_routes import tell_unused
from kvpool.transfer.peers import PeerCallback, PeerEvent, PeerInfo, RankInfo, RecallResult, nccl_library, ucx_library
from kvpool.transfer.received import Received, ReceivedCallback
from kvpool.transfer.reshard import ParallelConfig
from kvpool.transfer.stream import TransferStream
from kvpool.transfer.ticket import RankTicket
from kvpool.types import HBM, KVLayout, RawLayout, TransferTotals

__all__ = ["PeerVerbs"]

_log = logging.getLogger("kvpool.peers")
_RECALL_MAX = 1 << 19  # blocks in one call


class PeerVerbs(_core.Pool):
    """Meeting peers, and what they send. The base of `Pool`, which documents what may be called when."""

    settings: Settings
    parallel: ParallelConfig | None
    kv_layout: KVLayout | RawLayout

    def __init__(self, **options: Any) -> None:
        """See `Pool`."""
        super().__init__(**options)
        self._serving = threading.Lock()
        self._prepared: Settings | None = None  # under _serving: of a service that is not published yet
        self._notes: list[str] = []  # what a log should say of it
        self._first_calls = 0  # under _serving: listen and connect that share it
        self._exporting = threading.Lock()
        self._rank_address: str | None = None
        self._callback: ReceivedCallback | None = None
        self._peer_callback: PeerCallback | None = None

    @property
    def name(self) -> str | None:
        """What peers call this pool; None before the first listen or connect."""
        return self._name()

    def listen(self, address: str = "tcp:127.0.0.1:0", *, name: str | None = None, secret: str | None = None) -> str:
        """Lets peers connect. May be called for several addresses.

        Args:
            address: "unix:/path"; "unix:@name", which leaves no file; "tcp:HOST:PORT", port 0 for any that is free. TCP
                needs a secret.
            name: What peers call this pool; by default the setting, or host, process and a random number.
            secret: What both sides must know; by default the setting. Over a Unix socket without a secret, only
                processes of the same user get in.

        Returns:
            The address to connect to, with the port that was given.

        Raises:
            ArgumentError: The address is none; TCP without a secret.
            StateError: The address is in use; or this pool speaks under another name or with another secret already.
                A listen that fails leaves the pool as it was: the next one may give another name and secret.
        """
        wanted = self._settings_for(name, secret)
        _core._check_listen_address(address, bool(wanted.secret))
        with self._speaking(name, wanted):
            bound = self._listen(address)
        _log.info("listening at %s", bound, extra={"address": bound})
        return bound

    def connect(
        self, address: str, *, secret: str | None = None, timeout: float | None = 5.0, wait: bool = True
    ) -> str:
        """Meets the pool that listens at an address. Either side can send to the other then.

        As long as nobody listens there it tries again, so that two processes may be started in any order. A wrong
        secret, version or layout fails at once. Both sides may connect to each other: one connection stays. Ctrl-C
        ends the wait. A pool of this host that listens on TCP is met over its Unix socket (setting ``unix_door``).
        Releases the GIL.

        All or nothing: a connect that fails leaves the pool as it was, and the next one may give another secret.

        Args:
            address: What its listen returned.
            secret: What both sides must know; by default the setting.
            timeout: Seconds; None: 30.
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
            StateError: This pool speaks with another secret already; or the peer has not noticed yet that an earlier
                connection has ended.
        """
        wanted = self._settings_for(None, secret)
        _core._check_connect_address(address, bool(wanted.secret))
        wait = flag_from(wait, "wait")
        with self._speaking(None, wanted):
            peer = self._connect(address, timeout, wait)
        _log.info("met %s at %s", peer, address, extra={"peer": peer, "address": address})
        return peer

    def export_rank(self, rank: int, *, address: str | None = None) -> str:
        """What a worker needs to become a rank of this logical instance: text for `RankArena.join`.

        It holds no secret. A rank is never replaced: when one is lost, so is the instance, whose verbs raise PeerLost
        from then on.

        Args:
            rank: Number of the rank; it must hold a layer.
            address: Where the worker connects to: an address of this pool's `listen`, as the worker's host knows it.
                By default a Unix socket of this host.

        Returns:
            A line of JSON.

        Raises:
            StateError: The pool is an instance of one rank: make it with ``parallel=``. Or an address is named, and it
                does not listen.
            ArgumentError: There is no such rank, or it holds no layer; the address is none.
            ArgumentTypeError: A value of the wrong type.
        """
        if self.parallel is None or not isinstance(self.kv_layout, KVLayout):
            raise StateError("this pool is an instance of one rank: make it with parallel=ParallelConfig(...)")
        number = int_from(rank, "rank")
        slices = self.parallel.slices(self.kv_layout)
        if not 0 <= number < len(slices) or slices[number].layout is None:
            raise ArgumentError(
                f"there is no rank {shown(number)} that holds a layer; ranks are 0 to {len(slices) - 1}", rank=number
            )
        if address is None:
            with self._exporting:
                if self._rank_address is None:
                    self._rank_address = self.listen(f"unix:@kvpool-{secrets.token_hex(16)}")
                address = self._rank_address
        else:
            _core._check_connect_address(address, bool(self.settings.secret))
        epoch, instance = self._scheduler_facts()
        capacity = self._stats()
        return RankTicket(
            address=address,
            epoch=epoch,
            instance=instance,
            name=self._name() or "",
            rank=number,
            layout=self.kv_layout,
            parallel=self.parallel,
            hbm_blocks=capacity["hbm"]["capacity"],
            dram_blocks=capacity["dram"]["capacity"],
        ).text()

    def ranks(self) -> list[RankInfo]:
        """The ranks of this logical instance that hold a part of its blocks, joined or not.

        Raises:
            StateError: The pool is an instance of one rank, or no rank was exported yet.
        """
        return [RankInfo(*rank) for rank in self._ranks()]

    def wait_for_ranks(self, timeout: float | None = 30.0) -> None:
        """Waits until all ranks have joined; before, the instance cannot meet peers. Releases the GIL.

        Args:
            timeout: Seconds; None: 30.

        Raises:
            DeadlineExceeded: Some have not joined in time.
            PeerLost: One was lost meanwhile.
            StateError: The pool is an instance of one rank, or no rank was exported yet.
        """
        if self._wait_for_ranks(timeout):
            return
        missing = [rank.rank for rank in self.ranks() if not rank.joined]
        raise DeadlineExceeded(f"ranks {missing} have not joined within the timeout")

    def _settings_for(self, name: str | None, secret: str | None) -> Settings:
        given = {key: value for key, value in (("name", name), ("secret", secret)) if value is not None}
        return dataclasses.replace(self.settings, **given)  # type: ignore[arg-type]  # replace() checks the types

    @contextlib.contextmanager
    def _speaking(self, name: str | None, wanted: Settings) -> Iterator[None]:
        """Around a listen or connect. The first that succeeds makes this a pool that speaks with peers, for good.

        Until then no verb sees the service. When the last call that shares it has failed, the service is gone.
        """
        first = self._prepare(name, wanted)
        try:
            yield
            if first:
                self._publish(wanted)
        finally:
            if first:
                self._end_first_call()

    def _prepare(self, name: str | None, wanted: Settings) -> bool:
        """Makes the service, unless there is one. Returns False when the pool speaks with peers already."""
        with self._serving:
            if (known := self._name()) is not None:
                if (name is not None and name != known) or wanted.secret != self.settings.secret:
                    what = "with another secret" if wanted.secret != self.settings.secret else f"as {known!r}"
                    raise StateError(f"this pool speaks with peers {what} already")
                return False
            if self._prepared is None:
                try:
                    self._notes = self._start_service(wanted, ucx_library(wanted.ucx), nccl_library(wanted.nccl))
                    self._prepared = wanted
                except BaseException:  # Ctrl-C is heard behind the call, which may have made the service
                    self._drop_prepared()
                    raise
            elif self._prepared != wanted:
                raise StateError(
                    "another thread is in this pool's first listen or connect, with another name or secret"
                )
            self._first_calls += 1
            return True

    def _publish(self, wanted: Settings) -> None:
        with self._serving:
            if self._prepared is None:
                return  # another call was the first
            self._publish_service()
            self._prepared, self.settings = None, wanted
        for note in self._notes:
            _log.warning("%s", note)
        tell_unused(self, wanted)

    def _end_first_call(self) -> None:
        with self._serving:
            self._first_calls -= 1
            if self._first_calls == 0 and self._prepared is not None:
                self._drop_prepared()

    def _drop_prepared(self) -> None:
        self._prepared = None
        with contextlib.suppress(Error):  # this is a forked child, whose parent has the service
            self._drop_service()

    def peers(self) -> list[PeerInfo]:
        """The peers that are connected now."""
        return [PeerInfo.of(*peer) for peer in self._peers()] if self._name() is not None else []

    def transfer_totals(self) -> dict[str, TransferTotals]:
        """How the transfers ended that this pool has begun: "send" (transfer and its like) and "fetch".

        Empty before it has met a peer. What peers send or fetch by themselves counts there.
        """
        if self._name() is None:
            return {}
        return {kind: TransferTotals(*totals) for kind, totals in self._transfer_counts().items()}

    def open_transfer(
        self,
        peer: str,
        addrs: _core.AddressVector,
        *,
        tokens: _core.TokenVector | None = None,
        namespace: str = "",
        to: _core.AddressVector | None = None,
        medium: int = HBM,
        evict: bool = True,
        private: _core.Bytes | None = None,
        strategy: str = "by_layer",
        priority: str = "prefill",
        route: str | None = None,
        checksum: bool = False,
        stream: object = None,
        timeout: float | None = 30.0,
    ) -> TransferStream:
        """Begins a transfer whose layers are sent one by one, as they are computed. The other arguments: see transfer.

        Args:
            peer: Its name.
            addrs: Blocks of this pool; their content need not be there yet.
            tokens: Insert the blocks at the receiver as this prompt: see transfer_with_insert.
            namespace: Of the prompt.
            to: Blocks that the peer lent.
            medium: Where the receiver reserves.
            evict: Whether the receiver may drop cached prompts for it.
            private: For the receiving application.
            strategy: "by_layer", or "by_layer_agg", where of each layer what lies in a row is one call; any other, as
                "auto", is "by_layer_agg".
            priority: "decode", "prefill" or "background".
            route: One route.
            checksum: The receiver verifies the content.
            stream: For every layer that names none: see transfer. It is asked when the layer is sent, not now.
            timeout: Seconds from now until it fails with DeadlineExceeded.

        Returns:
            A TransferStream.

        Raises:
            As transfer.
        """
        transfer = self._open_transfer(
            peer, addrs, tokens=tokens, namespace=namespace, to=to, medium=medium, evict=evict, private=private,
            strategy=strategy, priority=priority, route=route, checksum=checksum, stream=stream, timeout=timeout,
        )  # fmt: skip
        return TransferStream(transfer, stream)

    def on_received(self, callback: Callable[[Received], object]) -> ReceivedCallback:
        """Calls back for each item that `received` would return, in a thread that the pool keeps for it.

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
        with self._serving:
            if self._callback is not None and not self._callback.closed:
                raise StateError("there is a callback already: close it first")
            self._callback = ReceivedCallback(self, callback)
            return self._callback

    def recall(self, peer: str, blocks: object = None, *, timeout: float | None = None) -> RecallResult:
        """Asks a peer for blocks back that are lent to it, and takes at the deadline what it has not given back.

        The peer's application hears of it (a "recalled" event of its `on_peer`) and may use the blocks until the
        deadline. From then on they are not its own any more: its transfers to them end with StaleAddress, and so does
        whatever names them. A peer that is stopped, or does not care, delays nothing: blocks that this process writes
        for it (``sock``) are free at the deadline, those that it writes by itself are quarantined until it says that it
        does so no more, or is proved to be gone. Returns as soon as all are back. Ctrl-C ends the wait, not the recall.
        Releases the GIL.

        Args:
            peer: Its name.
            blocks: Their addresses; or how many of them, whichever; None: all.
            timeout: Seconds until the deadline; None: 30.

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
            return RecallResult(*self._recall(peer, None, count, timeout))
        return RecallResult(*self._recall(peer, blocks, 0, timeout))

    def on_peer(self, callback: Callable[[PeerEvent], object]) -> PeerCallback:
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
        with self._serving:
            if self._peer_callback is not None and not self._peer_callback.closed:
                raise StateError("there is a callback already: close it first")
            self._peer_callback = PeerCallback(self, callback)
            return self._peer_callback

    def close(self) -> None:
        """Ends the pool: every verb raises ClosedError from now on. Views of the memory stay valid. Idempotent.

        Peers are told; transfers that are under way end with ClosedError here and PeerLost there. The memory is free
        as soon as no view shows it. Only what a peer may still write to by its address (cma, ucx; a process that was
        stopped in a write) is kept until that peer has ended.
        """
        super().close()
        for callback in (self._callback, self._peer_callback):
            if callback is not None:
                callback.close()
