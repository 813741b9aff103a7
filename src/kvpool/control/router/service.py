"""The router as one object: what its parts share, and what runs beside requests: probes, and the passing of time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

from kvpool.control.router.budget import Budget
from kvpool.control.router.fleet import Fleet, Instance
from kvpool.control.router.forward import Forwarder
from kvpool.control.router.logs import LOGGER
from kvpool.control.router.metrics import Metrics
from kvpool.control.router.prompts import Kind, PromptReader, load_tokenizer
from kvpool.control.router.settings import InstanceSpec, RouterSettings
from kvpool.control.router.upstream import UpstreamError

__all__ = ["Router"]

_TICK_S: Final = 0.5
_EXPIRE_TICKS: Final = 20


class Router:
    """Belongs to one event loop, from `running` on.

    Args:
        settings: All that can be said.

    Raises:
        ArgumentError: The profile or the tokenizer is none.
        Unsupported: A tokenizer is given, and its package is missing.
    """

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.fleet = Fleet(settings, self.metrics)
        self._budget = Budget(settings.held_bytes_max, settings.requests_max)
        self._reader = PromptReader(load_tokenizer(settings.tokenizer))
        self._probes: dict[str, asyncio.Task[None]] = {}

    def forwarder(self, kind: Kind) -> Forwarder:
        """The ASGI application of an endpoint."""
        return Forwarder(self.settings, self.fleet, self._reader, self._budget, self.metrics, kind)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Probes instances and lets time pass, as long as the context is open; then closes all connections."""
        ticking = asyncio.create_task(self._tick())
        for instance in self.fleet:
            self._probe(instance)
        try:
            yield
        finally:
            await _end(ticking, *self._probes.values())
            self._probes.clear()
            for instance in self.fleet:
                await instance.upstream.close()

    def add(self, spec: InstanceSpec) -> Instance:
        """An instance joins. Raises ArgumentError when it is there already."""
        instance = self.fleet.add(spec)
        self._probe(instance)
        return instance

    async def remove(self, name: str) -> None:
        """An instance leaves. Raises StateError while it has requests, ArgumentError when it is not there."""
        instance = self.fleet.remove(name)
        if name in self._probes:
            await _end(self._probes.pop(name))
        await instance.upstream.close()

    # ---- inside

    def _probe(self, instance: Instance) -> None:
        if self.settings.health.probes:
            self._probes[instance.spec.name] = asyncio.create_task(self._keep_probing(instance))

    async def _keep_probing(self, instance: Instance) -> None:
        health = self.settings.health
        while True:
            known, wrong = True, None
            try:
                wrong = await instance.upstream.probe(health.path, health.timeout_s)
            except UpstreamError:  # of the router's own making
                known = False
            except Exception as error:  # whatever it is: who is not asked again would be out for ever
                LOGGER.exception("error")
                wrong = type(error).__name__
            if known:
                self.fleet.probed(instance, wrong)
            await asyncio.sleep(health.interval_s * random.uniform(0.9, 1.1))  # not all at the same moment

    async def _tick(self) -> None:
        ticks = 0
        while True:
            await asyncio.sleep(_TICK_S)
            ticks += 1
            try:
                self.fleet.tick()
                if ticks % _EXPIRE_TICKS == 0:
                    self.fleet.scheduler.expire()
            except Exception:  # time passes on
                LOGGER.exception("error")


async def _end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError):
            await task
