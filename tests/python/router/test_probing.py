"""The thread that probes instances."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

from router.router_kit import PATIENCE_S

from kvpool.control.router import probing
from kvpool.control.router.probing import Probing
from kvpool.control.router.settings import HealthSettings


class Well:
    """A prober of an instance that is well."""

    def __init__(self, spec, timeout_s):
        pass

    async def probe(self, path):
        return None

    async def close(self):
        pass


class Instance:
    spec = SimpleNamespace(name="one")


def test_an_instance_that_comes_back_while_it_is_forgotten_is_probed(monkeypatch):
    monkeypatch.setattr(probing, "Prober", Well)
    old, new, told = Instance(), Instance(), []

    async def run():
        probes = Probing(HealthSettings(interval_s=0.01), lambda instance, wrong: told.append(instance))
        probes.start()
        try:
            probes.watch(old)
            forgetting = asyncio.create_task(probes.forget(old))
            await asyncio.sleep(0)  # it has been asked for, and is not done
            probes.watch(new)
            await forgetting
            told.clear()
            end = time.monotonic() + PATIENCE_S
            while new not in told and time.monotonic() < end:
                await asyncio.sleep(0.01)
            assert new in told
            told.clear()
            await asyncio.sleep(0.1)
            assert old not in told
        finally:
            await probes.close()
        assert not probes._tasks

    asyncio.run(run())
