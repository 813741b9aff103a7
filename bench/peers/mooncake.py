"""Mooncake's transfer engine over TCP: one batch of writes from one process into the memory of another."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from mooncake.engine import TransferEngine  # type: ignore[import-not-found]  # in its own environment only

from bench.transfer.side import Side, buffer, region, scattered

_HOST = "127.0.0.1"
_PACKAGE = "mooncake-transfer-engine-non-cuda"


class Subject(Side):
    """See bench/transfer/side.py. Sender and receiver."""

    def __init__(self) -> None:
        self._engine = TransferEngine()
        if self._engine.initialize(_HOST, "P2PHANDSHAKE", "tcp", "") != 0:
            raise RuntimeError("Mooncake's engine does not start")

    def version(self) -> str:
        return f"mooncake {metadata.version(_PACKAGE)}"

    def receive(self, count: int, size: int) -> dict[str, Any]:
        self._register(count, size)
        return {"address": f"{_HOST}:{self._engine.get_rpc_port()}", "base": self._memory.ctypes.data}

    def send(self, count: int, size: int, target: dict[str, Any]) -> list[int]:
        self._register(count, size)
        self._order = scattered(count, 1)
        slots = scattered(count, 2)
        here = [int(self._memory.ctypes.data + slot * size) for slot in self._order]
        there = [int(target["base"] + slot * size) for slot in slots]
        sizes = [size] * count

        def write() -> None:
            result = self._engine.batch_transfer_sync_write(target["address"], here, there, sizes)
            if result != 0:
                raise RuntimeError(f"Mooncake says {result}")

        self._calls = {"batch": write}
        return [int(slot) for slot in slots]

    def end(self) -> None:
        self._calls = {}
        self._engine.unregister_memory(self._memory.ctypes.data)
        del self._memory, self._region

    def _register(self, count: int, size: int) -> None:
        self._memory = buffer(2 * count * size)
        self._region = region(self._memory, size)
        if self._engine.register_memory(self._memory.ctypes.data, self._memory.nbytes) != 0:
            raise RuntimeError("Mooncake refuses the memory")
