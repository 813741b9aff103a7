"""The service of a pool, which answers peers. The first listen or connect that succeeds starts it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from typing import Any

from kvpool import _core
from kvpool.config import Settings
from kvpool.errors import Error
from kvpool.peers.callback import PeerCallback
from kvpool.transfer.dispatcher import CallbackSlot
from kvpool.transfer.gpu_routes import tell_unused
from kvpool.transfer.libraries import nccl_library, ucx_library
from kvpool.transfer.received import ReceivedCallback
from kvpool.transfer.reshard import ParallelConfig
from kvpool.types import KVLayout, RawLayout

__all__ = ["NetworkedPool"]

_log = logging.getLogger("kvpool.peers")


class NetworkedPool(_core.Pool):
    """A pool that can start its service. The base of `Pool`; `Pool.peers` and the like use it."""

    settings: Settings
    kv_layout: KVLayout | RawLayout
    _parallel: ParallelConfig | None

    def __init__(self, **options: Any) -> None:
        """See `Pool`."""
        super().__init__(**options)
        self._serving = threading.Lock()
        self._prepared = False  # under _serving: a service exists and is not published yet
        self._notes: list[str] = []  # its notes for the log
        self._first_calls = 0  # under _serving: calls of listen and connect that share it
        self._exporting = threading.Lock()
        self._rank_address: str | None = None  # under _exporting
        self._made_up = f"{socket.gethostname() or 'pool'}-{os.getpid()}-{secrets.token_hex(4)}"
        self._received_callback: CallbackSlot[ReceivedCallback] = CallbackSlot(self._serving)
        self._peer_callback: CallbackSlot[PeerCallback] = CallbackSlot(self._serving)

    @property
    def _own_name(self) -> str:
        """The name that peers get to know, from the start: the setting, or host, process and a random number."""
        return self.settings.name or self._made_up

    @contextlib.contextmanager
    def _speaking(self) -> Iterator[None]:
        """Encloses a listen or connect. The first that succeeds publishes the service for good.

        Before that no verb sees the service. When all calls that share it have failed, the service is dropped.
        """
        first = self._prepare()
        try:
            yield
            if first:
                self._publish()
        finally:
            if first:
                self._end_first_call()

    def _prepare(self) -> bool:
        """Makes the service unless it exists. Returns False when it is published already."""
        with self._serving:
            if self._name() is not None:
                return False
            if not self._prepared:
                wanted = dataclasses.replace(self.settings, name=self._own_name)
                try:
                    self._notes = self._start_service(wanted, ucx_library(wanted.ucx), nccl_library(wanted.nccl))
                    self._prepared = True
                except BaseException:  # Ctrl-C raises after the call, which may have made the service
                    self._drop_prepared()
                    raise
            self._first_calls += 1
            return True

    def _publish(self) -> None:
        with self._serving:
            if not self._prepared:
                return  # another call was the first
            self._publish_service()
            self._prepared = False
        for note in self._notes:
            _log.warning("%s", note)
        tell_unused(self, self.settings)

    def _end_first_call(self) -> None:
        with self._serving:
            self._first_calls -= 1
            if self._first_calls == 0 and self._prepared:
                self._drop_prepared()

    def _drop_prepared(self) -> None:
        self._prepared = False
        with contextlib.suppress(Error):  # in a forked child: the service belongs to the parent
            self._drop_service()

    def close(self) -> None:
        """Ends the pool and its callbacks: see `Pool.close`."""
        super().close()
        self._received_callback.close()
        self._peer_callback.close()
