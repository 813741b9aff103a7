"""A machine that executes the steps of ptx.py: threads, registers and memory of one launch.

Every thread has its own program counter and registers. Threads that stand at the same place execute a step together, as
NumPy arrays, which takes a hundredth of the time; the ones that are furthest behind go first. Every access to memory
must be aligned and within one of the buffers that the launch was given, and a byte is written only once: else Fault.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

__all__ = ["END", "PARAMETERS", "Branch", "Fault", "Kernel", "Lanes", "Launch", "Memory", "Step", "Values", "run"]

THREADS = 256  # of a block
PARAMETERS = 1 << 60  # where a launch finds its arguments
STEPS_MAX = 1_000_000  # basic blocks of one launch

END = 1 << 30  # the program counter of a thread that has returned
_POISON = 0xDEADBEEFDEADBEEF  # of a register that was not written

Lanes = np.ndarray  # the numbers of the threads that execute an instruction
Values = np.ndarray  # one for each of them: 64 bits, of which an instruction uses as many as its type has
Step = Callable[["Launch", Lanes], None]


class Fault(Exception):
    """A kernel has done what a GPU would not have survived."""


@dataclass
class _Buffer:
    base: int
    data: np.ndarray
    written: np.ndarray | None  # by byte; None: read only


@dataclass
class Memory:
    """Buffers at addresses. Bytes between them do not exist."""

    buffers: list[_Buffer] = field(default_factory=list)

    def add(self, base: int, content: bytes, *, writable: bool = False) -> None:
        data = np.frombuffer(content, np.uint8).copy()
        self.buffers.append(_Buffer(base, data, np.zeros(len(data), bool) if writable else None))

    def content(self, base: int) -> bytes:
        return next(one.data.tobytes() for one in self.buffers if one.base == base)

    def load(self, addresses: Values, nbytes: int) -> np.ndarray:
        """The bytes there, a row for each address."""
        rows = np.empty((len(addresses), nbytes), np.uint8)
        for buffer, which, places in self._places(addresses, nbytes):
            rows[which] = buffer.data[places]
        return rows

    def store(self, addresses: Values, rows: np.ndarray) -> None:
        for buffer, which, places in self._places(addresses, rows.shape[1]):
            if buffer.written is None:
                raise Fault(f"a write to what may only be read, at {int(addresses[which][0]):#x}")
            if buffer.written[places].any() or len(np.unique(places)) != places.size:
                raise Fault(f"a byte is written twice, near {int(addresses[which][0]):#x}")
            buffer.data[places] = rows[which]
            buffer.written[places] = True

    def _places(self, addresses: Values, nbytes: int) -> list[tuple[_Buffer, np.ndarray, np.ndarray]]:
        """The buffers that the addresses are in, which of the addresses, and the indices of their bytes."""
        if (addresses % np.uint64(nbytes)).any():
            raise Fault(f"an access of {nbytes} bytes that is not aligned")
        found = []
        missing = np.ones(len(addresses), bool)
        for buffer in self.buffers:
            if len(buffer.data) < nbytes:
                continue
            first, last = np.uint64(buffer.base), np.uint64(buffer.base + len(buffer.data) - nbytes)
            here = (addresses >= first) & (addresses <= last)
            if here.any():
                starts = (addresses[here] - first).astype(np.int64)
                found.append((buffer, here, starts[:, None] + np.arange(nbytes)))
                missing &= ~here
        if missing.any():
            raise Fault(f"{nbytes} bytes at {int(addresses[missing][0]):#x}, where no memory is")
        return found


@dataclass
class Kernel:
    """One entry of a PTX text."""

    name: str
    parameter_bytes: int
    steps: list[Step | Branch]
    leaders: set[int]  # where basic blocks begin
    opcodes: list[str]


@dataclass
class Branch:
    target: int  # END for a return
    predicate: str | None
    negated: bool


class Launch:
    def __init__(self, memory: Memory, parameters: Memory, blocks: int) -> None:
        lanes = np.arange(blocks * THREADS, dtype=np.uint64)
        self.memory, self.parameters, self.lanes = memory, parameters, len(lanes)
        self._registers = {
            "%tid.x": lanes % np.uint64(THREADS),
            "%ctaid.x": lanes // np.uint64(THREADS),
            "%nctaid.x": np.full(len(lanes), blocks, np.uint64),
        }

    def read(self, name: str, lanes: Lanes) -> Values:
        if name not in self._registers:
            raise Fault(f"{name} is read and was never written")
        return self._registers[name][lanes]

    def write(self, name: str, lanes: Lanes, values: Values) -> None:
        if name not in self._registers:
            self._registers[name] = np.full(self.lanes, _POISON, np.uint64)
        self._registers[name][lanes] = values


def run(kernel: Kernel, arguments: bytes, memory: Memory, blocks: int) -> None:
    """Executes all threads of a launch. Raises Fault."""
    if len(arguments) > kernel.parameter_bytes:
        raise ValueError(f"{kernel.name} takes {kernel.parameter_bytes} bytes of arguments, not {len(arguments)}")
    parameters = Memory()
    parameters.add(PARAMETERS, arguments)
    launch = Launch(memory, parameters, blocks)
    counters = np.zeros(launch.lanes, np.int64)
    for _ in range(STEPS_MAX):
        at = int(counters.min())
        if at == END:
            return
        lanes = np.flatnonzero(counters == at)
        while True:
            step = kernel.steps[at] if at < len(kernel.steps) else Branch(END, None, False)
            if isinstance(step, Branch):
                taken = np.ones(len(lanes), bool)
                if step.predicate is not None:
                    taken = (launch.read(step.predicate, lanes) != 0) != step.negated
                counters[lanes] = np.where(taken, step.target, at + 1)
                break
            step(launch, lanes)
            at += 1
            if at in kernel.leaders:
                counters[lanes] = at
                break
    raise Fault(f"{kernel.name} does not end")
