"""Asking instances how they are, on a separate event loop and thread.

On the loop of the requests a probe would be late whenever they keep it busy, and instances that are well would be
thrown out just when there is much to do.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from kvpool.control.router.lease import Instance
from kvpool.control.router.logs import LOGGER
from kvpool.control.router.settings import HealthSettings
from kvpool.control.router.upstream import Prober, UpstreamError

__all__ = ["Probing"]


class Probing:
    """Probes instances until it is stopped. It reports in the event loop that started it.

    Args:
        health: How often, and how long.
        tell: Called with an instance and its fault, or None.
    """

    def __init__(self, health: HealthSettings, tell: Callable[[Instance, str | None], None]) -> None:
        self._health = health
        self._tell = tell
        self._tasks: dict[Instance, asyncio.Task[None]] = {}  # of the thread's loop
        self._home: asyncio.AbstractEventLoop | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread. In the event loop that is to be told; nothing happens where there are to be no probes."""
        if not self._health.probes:
            return
        self._home = asyncio.get_running_loop()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="kvpool-probes", daemon=True)
        self._thread.start()

    def watch(self, instance: Instance) -> None:
        """Probes an instance from now on; nothing happens before `start`."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._watch, instance)

    async def forget(self, instance: Instance) -> None:
        """Probes an instance no longer."""
        await self._there(self._end(instance))

    async def close(self) -> None:
        """Ends all probes and the thread."""
        if self._loop is None or self._thread is None:
            return
        await self._there(self._end_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)
        self._loop.close()
        self._loop = self._thread = None

    # ---- on the thread

    def _run(self) -> None:
        assert self._loop is not None
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _there(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs something on the thread, and waits for it here."""
        if self._loop is None:
            work.close()
            return
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def _watch(self, instance: Instance) -> None:
        assert self._loop is not None
        self._tasks[instance] = self._loop.create_task(self._keep_probing(instance))

    async def _end_all(self) -> None:
        await self._end(*self._tasks)

    async def _end(self, *instances: Instance) -> None:
        tasks = [self._tasks.pop(instance) for instance in instances if instance in self._tasks]
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task

    async def _keep_probing(self, instance: Instance) -> None:
        health = self._health
        prober = Prober(instance.spec, health.timeout_s)
        try:
            while True:
                with suppress(UpstreamError):  # a fault of the router: it says nothing about the instance
                    self._say(instance, await self._probe(prober))
                await asyncio.sleep(health.interval_s * random.uniform(0.9, 1.1))  # not all at the same moment
        finally:
            await prober.close()

    async def _probe(self, prober: Prober) -> str | None:
        try:
            return await prober.probe(self._health.path)
        except UpstreamError:
            raise
        except Exception as error:  # any error: an instance that is not probed again would be out forever
            LOGGER.exception("error")
            return type(error).__name__

    def _say(self, instance: Instance, wrong: str | None) -> None:
        assert self._home is not None
        with suppress(RuntimeError):  # the loop has been closed
            self._home.call_soon_threadsafe(self._tell, instance, wrong)
