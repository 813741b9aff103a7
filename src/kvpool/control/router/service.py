"""The router as one object: what its parts share, and what runs beside requests: probes, and the passing of time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

import anyio.to_thread

from kvpool.control.router.adapter_names import AdapterNames
from kvpool.control.router.adapters import Adapters
from kvpool.control.router.budget import Budget
from kvpool.control.router.fleet import Fleet
from kvpool.control.router.forward import Forwarder
from kvpool.control.router.intake import Intake
from kvpool.control.router.lease import Instance
from kvpool.control.router.logs import LOGGER
from kvpool.control.router.members import ClusterInstances
from kvpool.control.router.metrics import Metrics
from kvpool.control.router.probing import Probing
from kvpool.control.router.prompts import Kind, PromptReader
from kvpool.control.router.settings import InstanceSpec, RouterSettings
from kvpool.control.router.tokenizing import Tokenizing

__all__ = ["Router"]

_TICK_S: Final = 0.5
_EXPIRE_NODES: Final = 2048  # of a tree, in a tick: under a millisecond


class Router:
    """Belongs to one event loop, from `running` on.

    Args:
        settings: All that can be said.

    Raises:
        ArgumentError: The profile, the tokenizer or the cluster's URL is invalid.
        DeadlineExceeded, AuthError, StateError: There is a cluster, and it cannot be joined.
        Unsupported: A tokenizer is given, or events are to be followed, and a package for it is missing.
    """

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        self.metrics = Metrics()
        adapters = AdapterNames()
        self.fleet = Fleet(settings, self.metrics, adapters=adapters)
        by_events = bool(settings.events) or settings.cluster is not None  # whose members may publish some
        self._adapters = Adapters(settings, self.fleet, adapters) if by_events else None
        self._budget = Budget(settings.held_bytes_max, settings.requests_max)
        self._intake = Intake(settings)
        self._tokenizing = None if settings.tokenize is None else Tokenizing(settings, self.fleet, self.metrics)
        self._reader = PromptReader(
            settings.tokenizer,
            settings.prompt_bytes_max,
            settings.readers,
            settings.reader_wait_s,
            None if self._tokenizing is None else self._tokenizing.ask,
            adapters if by_events else None,
        )
        self._probing = Probing(settings.health, self.fleet.probed)
        self._members: ClusterInstances | None = None
        if settings.cluster is not None:
            self._members = ClusterInstances(settings.cluster, self.fleet, self.add, self.remove)

    def forwarder(self, kind: Kind) -> Forwarder:
        """The ASGI application of an endpoint."""
        return Forwarder(self.settings, self.fleet, self._intake, self._reader, self._budget, self.metrics, kind)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Probes instances and lets time pass, as long as the context is open; then closes all connections."""
        running = [asyncio.create_task(self._tick())]
        if self._adapters is not None:
            running.append(asyncio.create_task(self._adapters.run()))
        self._probing.start()
        for instance in self.fleet:
            self._probing.watch(instance)
        try:
            yield
        finally:
            for task in running:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            if self._members is not None:
                await anyio.to_thread.run_sync(self._members.close)
            await self._probing.close()
            self.fleet.close()
            for asking in (self._tokenizing, self._adapters):
                if asking is not None:
                    await asking.close()
            for instance in self.fleet:
                await instance.upstream.close()
            self._reader.close()

    async def warm(self) -> None:
        """Starts what would otherwise be started by the first long prompt."""
        await self._reader.start()

    def add(self, spec: InstanceSpec) -> Instance:
        """An instance joins. Raises ArgumentError when it is there already."""
        instance = self.fleet.add(spec)
        self._probing.watch(instance)
        return instance

    async def remove(self, name: str) -> None:
        """An instance leaves. Raises StateError while it has requests, ArgumentError when it is not there."""
        instance = self.fleet.remove(name)
        await self._probing.forget(instance)
        await instance.upstream.close()

    # ---- inside

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                if self._members is not None:
                    await self._members.reconcile()
                self.fleet.tick()
                self.fleet.scheduler.expire(_EXPIRE_NODES)  # while no requests come, nothing else would
            except Exception:  # time passes on
                LOGGER.exception("error")
