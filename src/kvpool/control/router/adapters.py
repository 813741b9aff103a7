"""Which models of requests are LoRA adapters: instances compute their prompts apart, and KV events name them.

A request names an adapter as its `model`, as it names the model itself, which has any number of names. So the router
asks the instances, which list their models, and takes each adapter that an event names.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from kvpool.control.reading.asking import adapters_in, is_of_sglang, models_in
from kvpool.control.router.adapter_names import AdapterNames
from kvpool.control.router.fleet import Fleet
from kvpool.control.router.lease import Instance
from kvpool.control.router.logs import event
from kvpool.control.router.settings import RouterSettings
from kvpool.control.router.upstream import Asker, UpstreamError

__all__ = ["Adapters"]

_ANSWER_BYTES: Final = 4 << 20
_TIMEOUT_S: Final = 5.0
_LOOK_S: Final = 0.5
_AGAIN_S: Final = 30.0  # adapters may be loaded at any time
_AT_ONCE: Final = 8  # servers: one that does not answer keeps no other one waiting


class Adapters:
    """Asks instances for the names of their adapters. Belongs to one event loop.

    Args:
        settings: For the key of instances.
        fleet: The instances.
        names: Takes the names.
    """

    def __init__(self, settings: RouterSettings, fleet: Fleet, names: AdapterNames) -> None:
        self._key = None if settings.instance_key is None else f"Bearer {settings.instance_key}".encode()
        self._fleet = fleet
        self._names = names
        self._asker = Asker(_TIMEOUT_S)
        self._at_once = asyncio.Semaphore(_AT_ONCE)
        self._next: dict[tuple[int, int], float] = {}  # when, by the instance's number and how often it was ejected

    async def run(self) -> None:
        """Asks each instance when it comes up, and now and then, until it is cancelled."""
        while True:
            try:
                await self._ask_those_due()
            except Exception as error:  # names are a hint
                event(logging.WARNING, "adapters not known", cause=f"{type(error).__name__}: {error}")
            await asyncio.sleep(_LOOK_S)

    async def close(self) -> None:
        """Closes all connections."""
        await self._asker.close()

    async def _ask_those_due(self) -> None:
        now = asyncio.get_running_loop().time()
        up = {(each.number, each.epoch): each for each in self._fleet if each.in_table}
        self._next = {key: self._next.get(key, now) for key in up}
        due = [key for key, when in self._next.items() if when <= now]
        self._next |= dict.fromkeys(due, now + _AGAIN_S)
        servers = {up[key].spec.url: up[key] for key in due}  # the ranks of one have the same adapters
        await asyncio.gather(*map(self._ask, servers.values()))

    async def _ask(self, instance: Instance) -> None:
        try:
            async with self._at_once:
                status, data = await self._asker.get(instance.spec, "/v1/models", self._key, _ANSWER_BYTES)
        except UpstreamError:
            return  # probes say what is wrong
        if status == 200:
            for name in models_in(data):
                self._names.add_model(name)
            behind = is_of_sglang(data)
            for name in adapters_in(data):
                self._names.add_listed(name, behind)
