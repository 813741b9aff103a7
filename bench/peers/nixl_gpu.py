"""NIXL over its UCX backend between two processes that share the first GPU: its memory on both sides.

The memory comes from the driver, as cudaMalloc gives it, so that no torch for CUDA is needed. UCX is left to choose its
way, which within one host is CUDA IPC.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.gpu.device import Device
from bench.gpu.region import OnDevice
from bench.peers import nixl


class Subject(OnDevice, nixl.Subject):
    """See bench/transfer/side.py. Option: `parts` of a block, each of which is a descriptor."""

    _medium = "VRAM"

    def __init__(self) -> None:
        self._device = Device()  # before UCX looks for a GPU
        super().__init__()
        self._busy = True  # should UCX take another way, the receiver must not be what it waits for

    def receive(self, count: int, size: int, *, parts: int = 1) -> dict[str, Any]:
        self._parts = parts
        return super().receive(count, size)

    def send(self, count: int, size: int, target: dict[str, Any], *, parts: int = 1) -> list[int]:
        self._parts = parts
        return super().send(count, size, target)

    def facts(self) -> dict[str, Any]:
        return {"descriptors": len(self._order) * self._parts}

    def _allocate(self, slots: int, size: int) -> None:
        self._base = self._device.allocate(slots * size)
        self._host = np.zeros(slots * size, np.uint8)
        by_part = self._host.view(np.uint64).reshape(self._parts, slots, -1)
        self._region = by_part.transpose(1, 0, 2)
        self._device.write(self._base, self._host)

    def _free(self) -> None:
        self._device.free(self._base)
        del self._host, self._region

    def _look(self) -> None:
        self._device.enter()  # UCX asks for a current context in whatever thread it is called
        super()._look()
