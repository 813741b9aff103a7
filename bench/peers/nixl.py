"""NIXL over its UCX backend: writes from one process into the memory of another.

Memory is registered once. `prepared` posts one prepared request again and again, the least that NIXL can do; `new`
makes the request from prepared descriptor lists each time, as a caller whose blocks change does. Without a progress
thread, which costs more than it brings on few cores.
"""

from __future__ import annotations

import base64
import os
from importlib import metadata
from time import perf_counter_ns
from typing import Any

import numpy as np
from nixl import nixl_agent, nixl_agent_config  # type: ignore[import-not-found]  # in its own environment only

from bench.transfer.side import AttendingSide, buffer, region, scattered


class Subject(AttendingSide):
    """See bench/transfer/side.py. Sender and receiver."""

    def __init__(self) -> None:
        super().__init__()
        self._agent = nixl_agent(f"kvpool-bench-{os.getpid()}", nixl_agent_config(False, backends=["UCX"]))
        # Over TCP the receiver's own calls take the bytes in; shared memory needs it for meeting only.
        self._busy = os.environ.get("UCX_TLS") == "tcp"
        self._handles: list[Any] = []

    def version(self) -> str:
        return f"nixl {metadata.version('nixl')}"

    def receive(self, count: int, size: int) -> dict[str, Any]:
        self._register(count, size)
        return {
            "metadata": base64.b64encode(self._agent.get_agent_metadata()).decode(),
            "base": self._memory.ctypes.data,
        }

    def send(self, count: int, size: int, card: dict[str, Any]) -> list[int]:
        self._register(count, size)
        self._order = scattered(count, 1)
        slots = scattered(count, 2)
        name = self._agent.add_remote_agent(base64.b64decode(card["metadata"]))
        self._peer = name.decode() if isinstance(name, bytes) else name
        agent = self._agent
        here = agent.prep_xfer_dlist("NIXL_INIT_AGENT", _pieces(self._memory.ctypes.data, self._order, size), "DRAM")
        there = agent.prep_xfer_dlist(self._peer, _pieces(card["base"], slots, size), "DRAM")
        every = np.arange(count, dtype=np.int32)
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
        agent, base = self._agent, self._memory.ctypes.data
        lists = [
            agent.prep_xfer_dlist(name, _pieces(base, scattered(count, seed), size), "DRAM")
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
        del self._memory, self._region

    def _register(self, count: int, size: int) -> None:
        self._memory = buffer(2 * count * size)
        self._region = region(self._memory, size)
        whole = [(self._memory.ctypes.data, self._memory.nbytes, 0, "")]
        self._registered = self._agent.register_memory(whole, "DRAM")

    def _post(self, request: Any) -> None:
        state = self._agent.transfer(request)
        while state == "PROC":
            state = self._agent.check_xfer_state(request)
        if state != "DONE":
            raise RuntimeError(f"NIXL says {state}")

    def progress(self) -> None:
        self._agent.get_new_notifs()


def _pieces(base: int, slots: Any, size: int) -> Any:
    """Descriptors as NIXL takes them fastest: rows of address, length, device."""
    rows = np.zeros((len(slots), 3), np.uint64)
    rows[:, 0] = slots * size + base
    rows[:, 1] = size
    return rows
