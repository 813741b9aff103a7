"""NIXL over its UCX backend: writes from one process into the memory of another.

Memory is registered once. `prepared` posts one prepared request again and again, the least that NIXL can do; `new`
makes the request from prepared descriptor lists each time, as a caller whose blocks change does. Without a progress
thread, which costs more than it brings on few cores.
"""

from __future__ import annotations

import base64
import os
from importlib import import_module, metadata
from importlib.util import find_spec
from time import perf_counter_ns
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.transfer.side import AttendingSide, buffer, region, scattered


def _package() -> Any:
    """NIXL, or its half for one CUDA, which can be installed without the other and without torch."""
    for name in ("nixl", "nixl_cu13", "nixl_cu12"):
        if find_spec(name):
            return import_module(name)
    raise ImportError("NIXL is not installed")


_NIXL = _package()


class Subject(AttendingSide):
    """See bench/transfer/side.py. Sender and receiver."""

    _medium = "DRAM"
    _parts = 1  # descriptors of a block

    def __init__(self) -> None:
        super().__init__()
        config = _NIXL.nixl_agent_config(False, backends=["UCX"])
        self._agent = _NIXL.nixl_agent(f"kvpool-bench-{os.getpid()}", config)
        # Over TCP the receiver's own calls take the bytes in; shared memory needs it for meeting only.
        self._busy = os.environ.get("UCX_TLS") == "tcp"
        self._handles: list[Any] = []

    def version(self) -> str:
        return f"{_NIXL.__name__} {metadata.version(_NIXL.__name__)}"

    def receive(self, count: int, size: int) -> dict[str, Any]:
        self._register(count, size)
        return {"metadata": base64.b64encode(self._agent.get_agent_metadata()).decode(), "base": self._base}

    def send(self, count: int, size: int, target: dict[str, Any]) -> list[int]:
        self._register(count, size)
        self._order = scattered(count, 1)
        slots = scattered(count, 2)
        name = self._agent.add_remote_agent(base64.b64decode(target["metadata"]))
        self._peer = name.decode() if isinstance(name, bytes) else name
        agent = self._agent
        here = self._prepare("NIXL_INIT_AGENT", self._base, self._order, size)
        there = self._prepare(self._peer, target["base"], slots, size)
        every = np.arange(count * self._parts, dtype=np.int32)
        request = agent.make_prepped_xfer("WRITE", here, every, there, every)
        self._handles = [request, here, there]

        def new() -> None:
            again = agent.make_prepped_xfer("WRITE", here, every, there, every)
            self._post(again)
            again.release()

        self._calls = {"prepared": lambda: self._post(request), "new": new}
        return [int(slot) for slot in slots]

    def describe(self, count: int, size: int, n: int) -> list[float]:
        """Times of making a request for so many blocks from prepared lists, without posting it; microseconds."""
        self._register(count, size)
        agent = self._agent
        lists = [
            self._prepare(name, self._base, scattered(count, seed), size)
            for name, seed in (("NIXL_INIT_AGENT", 1), (agent.name, 2))
        ]
        every = np.arange(count, dtype=np.int32)
        times = []
        for _ in range(n):
            start = perf_counter_ns()
            request = agent.make_prepped_xfer("WRITE", lists[0], every, lists[1], every)
            times.append((perf_counter_ns() - start) / 1000)
            request.release()
        for each in lists:
            each.release()
        self.end()
        return times

    def end(self) -> None:
        for handle in self._handles:
            handle.release()
        if self._handles:
            self._agent.remove_remote_agent(self._peer)
        self._handles = []
        self._calls = {}
        self._agent.deregister_memory(self._registered)
        self._free()

    def _register(self, count: int, size: int) -> None:
        self._allocate(2 * count, size)
        self._registered = self._agent.register_memory([(self._base, 2 * count * size, 0, "")], self._medium)

    def _allocate(self, slots: int, size: int) -> None:
        """Sets `_base`, the address of so many slots of zeros, and `_region`."""
        self._memory = buffer(slots * size)
        self._base = self._memory.ctypes.data
        self._region = region(self._memory, size)

    def _free(self) -> None:
        """Undoes `_allocate`."""
        del self._memory, self._region

    def _prepare(self, agent: str, base: int, slots: npt.NDArray[np.int64], size: int) -> Any:
        """A descriptor list, as NIXL takes it fastest: rows of address, length, device.

        Blocks of several parts lie as an engine's with a tensor a layer: the first part of every slot, the second
        part of every slot, and so on.
        """
        every_slot, length = 2 * len(slots), size // self._parts
        numbers = slots[:, None] + np.arange(self._parts) * every_slot
        rows = np.zeros((numbers.size, 3), np.uint64)
        rows[:, 0] = numbers.reshape(-1) * length + base
        rows[:, 1] = length
        return self._agent.prep_xfer_dlist(agent, rows, self._medium)

    def _post(self, request: Any) -> None:
        state = self._agent.transfer(request)
        while state == "PROC":
            state = self._agent.check_xfer_state(request)
        if state != "DONE":
            raise RuntimeError(f"NIXL says {state}")

    def progress(self) -> None:
        self._agent.get_new_notifs()
