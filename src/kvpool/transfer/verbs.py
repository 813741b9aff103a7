"""The verbs of a pool that need peers, as far as they are written in Python."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

from kvpool import _core
from kvpool.config import Settings
from kvpool.errors import ArgumentTypeError, StateError
from kvpool.transfer.peers import PeerInfo, ucx_library
from kvpool.transfer.received import Received, ReceivedCallback
from kvpool.transfer.stream import TransferStream
from kvpool.types import HBM

__all__ = ["PeerVerbs"]

# Settings that the core takes as they are when the pool begins to speak with peers.
_SERVICE_SETTINGS = (
    "model", "lease_s", "reserve_s", "transfer_threads", "trusted_network", "unix_door", "transfers_max",
    "reserved_max", "received_max",
)  # fmt: skip


class PeerVerbs(_core.Pool):
    """Meeting peers, and what they send. The base of `Pool`, which documents what may be called when."""

    settings: Settings

    def __init__(self, **options: Any) -> None:
        """See `Pool`."""
        super().__init__(**options)
        self._serving = threading.Lock()
        self._callback: ReceivedCallback | None = None

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
        """
        self._serve(name, secret)
        return self._listen(address)

    def connect(self, address: str, *, secret: str | None = None, timeout: float | None = 5.0) -> str:
        """Meets the pool that listens at an address. Either side can send to the other then.

        Args:
            address: What its listen returned.
            secret: What both sides must know; by default the setting.
            timeout: Seconds; None: 30.

        Returns:
            The peer's name, for the verbs that take a peer.

        Raises:
            PeerLost: Nobody listens there.
            AuthError: The secrets differ.
            ProtocolError: It is no kvpool, or none that speaks our version.
            LayoutMismatch: Its blocks have another shape, or hold the cache of another model.
            DeadlineExceeded: It did not answer in time.
            StateError: This pool speaks with another secret already.
        """
        self._serve(None, secret)
        return self._connect(address, timeout)

    def _serve(self, name: str | None, secret: str | None) -> None:
        """Begins to speak with peers, if it has not begun."""
        given = {key: value for key, value in (("name", name), ("secret", secret)) if value is not None}
        wanted = dataclasses.replace(self.settings, **given)  # type: ignore[arg-type]  # replace() checks the types
        with self._serving:
            if self._name() is None:
                self._start_service(
                    name=wanted.name,
                    secret=wanted.secret,
                    routes=list(wanted.routes),
                    ucx=ucx_library(wanted.ucx),
                    **{setting: getattr(wanted, setting) for setting in _SERVICE_SETTINGS},
                )
                self.settings = wanted
            elif (name is not None and name != self._name()) or wanted.secret != self.settings.secret:
                what = "with another secret" if wanted.secret != self.settings.secret else f"as {self._name()!r}"
                raise StateError(f"this pool speaks with peers {what} already")

    def peers(self) -> list[PeerInfo]:
        """The peers that are connected now."""
        return [PeerInfo(*peer) for peer in self._peers()] if self._name() is not None else []

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
            strategy: "by_layer", or "by_layer_agg" to gather each layer into one message.
            priority: "decode", "prefill" or "background".
            route: One route.
            checksum: The receiver verifies the content.
            timeout: Seconds from now until it fails with DeadlineExceeded.

        Returns:
            A TransferStream.

        Raises:
            As transfer.
        """
        return TransferStream(
            self._open_transfer(
                peer, addrs, tokens=tokens, namespace=namespace, to=to, medium=medium, evict=evict, private=private,
                strategy=strategy, priority=priority, route=route, checksum=checksum, timeout=timeout,
            )
        )  # fmt: skip

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

    def close(self) -> None:
        """Ends the pool: every verb raises ClosedError from now on. Views of the memory stay valid. Idempotent.

        Peers are told; transfers that are under way end with ClosedError here and PeerLost there.
        """
        super().close()
        callback = self._callback
        if callback is not None:
            callback.close()
