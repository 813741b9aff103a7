"""One load: the longest prefix that the pool and the store have together, within a budget of time.

caller      match: what the pool has stays pinned until the end
a reader    keys, which of the others the store has, blocks for them
readers     each reads one part of them into its blocks
the last reader, or the alarm at the end of the budget
            insert the prefix that has come; free the other blocks

L1  A part's blocks belong to its reader until that has ended. So a part that is late frees its blocks itself, and
    nobody else does: a read that comes late never writes into a block of somebody else.
L2  Exactly one thread ends the load: the one that sets `_ended`.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpool.errors import Error
from kvpool.index import Match
from kvpool.storage.handles import StorageHandle
from kvpool.storage.shared import Shared

__all__ = ["Load", "Loaded"]

_ASKED_AT_ONCE = 64  # keys; the first that the store lacks ends the questions


@dataclass(frozen=True)
class Loaded:
    """What a load has ended with. The pool pins nothing for it: match the prompt next.

    Attributes:
        tokens: Cached in the pool, from the prompt's start.
        loaded_tokens: Of them, brought by this load.
        late: Whether the budget ended it, so that the store may have more.
    """

    tokens: int
    loaded_tokens: int
    late: bool


@dataclass
class _Part:
    """Blocks that one reader fills. `read` of them have come, from the first on, when it has ended."""

    keys: Sequence[bytes]
    addrs: npt.NDArray[np.uint64]
    read: int = 0
    ended: bool = False


class Load:
    """A load under way.

    Args:
        shared: Of the Storage.
        tokens: The prompt.
        namespace: Of the prompt.
        hit: What the pool has. Closed at the end.
        until: When the budget ends (time.monotonic).
    """

    def __init__(self, shared: Shared, tokens: npt.NDArray[np.int64], namespace: str, hit: Match, until: float) -> None:
        self.handle: StorageHandle[Loaded] = StorageHandle()
        self._shared = shared
        self._tokens = tokens
        self._namespace = namespace
        self._hit = hit
        self._until = until
        self._lock = threading.Lock()
        self._ended = False
        self._parts: list[_Part] = []
        self._failed = False

    def begin(self) -> None:
        """Starts it. The caller is not held up."""
        self._shared.reads_first.begin()
        if not self._shared.readers.submit(self._start, self._out_of_time):
            self._out_of_time()
            return
        alarm = weakref.WeakMethod(self._out_of_time)  # a load that has ended need not stay until its budget has
        self._shared.alarm.at(self._until, lambda: call() if (call := alarm()) is not None else None)
        self.handle.on_cancel(lambda: self._end(cancelled=True))

    def _out_of_time(self) -> None:
        self._end(late=True)

    # ---- readers

    def _start(self) -> None:
        parts: list[_Part] = []
        try:
            keys = self._shared.keys.of_tokens(self._tokens, self._namespace)[len(self._hit.addrs) :]
            parts = self._parts_of(keys[: self._stored(keys)])
        except Error as error:  # the pool's
            self._end(error=error)
        with self._lock:
            begun = not self._ended
            if begun:
                self._parts = parts
        if not begun:
            self._give_back(parts)
        elif not parts:
            self._end()
        else:
            for part in parts[1:]:
                read, drop = functools.partial(self._read, part), functools.partial(self._part_ended, part)
                if not self._shared.readers.submit(read, drop):
                    self._part_ended(part)
            self._read(parts[0])

    def _stored(self, keys: Sequence[bytes]) -> int:
        """How many of them the store has, from the first on."""
        for first in range(0, len(keys), _ASKED_AT_ONCE):
            part = keys[first : first + _ASKED_AT_ONCE]
            left = self._until - time.monotonic()
            if left <= 0 or self._ended:
                return 0
            try:
                found = self._shared.store.exists(part, timeout=left)
            except Exception as error:  # whatever a store raises
                self._store_failed(error)
                return first
            self._shared.counters.add(asked_blocks=len(part))
            if not all(found):
                return first + found.index(False)
        return len(keys)

    def _parts_of(self, keys: Sequence[bytes]) -> list[_Part]:
        """Blocks for as many of them as the pool has room for, in parts."""
        memory = self._shared.memory
        addrs = memory.alloc(len(keys)) if len(keys) and not self._ended else np.empty(0, np.uint64)
        step = memory.batch_blocks
        return [_Part(keys[at : at + step], addrs[at : at + step]) for at in range(0, len(addrs), step)]

    def _read(self, part: _Part) -> None:
        shared = self._shared
        found: list[bool] = []
        try:
            left = self._until - time.monotonic()
            if left > 0 and not self._ended:
                contents = [shared.memory.content(int(address)) for address in part.addrs]
                found = shared.store.get(part.keys[: len(contents)], contents, timeout=left)
        except Exception as error:  # whatever a store raises
            self._store_failed(error)
        finally:
            self._part_ended(part, found.index(False) if False in found else len(found))

    def _part_ended(self, part: _Part, read: int = 0) -> None:
        with self._lock:
            part.ended, part.read = True, read
            late = self._ended
            last = not late and all(one.ended for one in self._parts)
        if late:
            self._give_back([part])  # L1
        elif last:
            self._end()

    def _store_failed(self, error: Exception) -> None:
        """A call of the store has failed. What the deadline ended is counted at the end, as late."""
        if time.monotonic() >= self._until:
            return
        self._failed = True
        self._shared.counters.add(read_errors=1)
        self._shared.warnings.failed("loading", error, self._shared.reading.failed())

    # ---- the end

    def _end(self, *, late: bool = False, cancelled: bool = False, error: Error | None = None) -> None:
        """Inserts what has come, and gives the rest back."""
        with self._lock:
            if self._ended:
                return
            self._ended = True  # L2
            taken, rest = _divided([] if cancelled or error is not None else self._parts, self._parts)
        self._shared.reads_first.end()
        try:
            self._shared.memory.free(rest)
            result = self._inserted(taken, late)
        except Error as failure:
            self.handle.fail(error or failure)
            return
        finally:
            self._hit.close()
        if error is not None:
            self.handle.fail(error)
        elif not cancelled:
            self._judge(result)
            self.handle.resolve(result)

    def _inserted(self, addrs: npt.NDArray[np.uint64], late: bool) -> Loaded:
        shared = self._shared
        step = shared.pool.kv_layout.block_tokens
        have = len(self._hit.addrs)
        tokens = (have + len(addrs)) * step
        if len(addrs):
            try:
                shared.pool.insert(
                    self._tokens[:tokens], np.concatenate([self._hit.addrs, addrs]), self._namespace,
                    free_duplicates=True,
                ).close()  # fmt: skip
            except BaseException:
                shared.memory.free(addrs)
                raise
            shared.counters.add(loaded_blocks=len(addrs), loaded_bytes=len(addrs) * shared.memory.block_bytes)
        return Loaded(tokens=tokens, loaded_tokens=len(addrs) * step, late=late)

    def _judge(self, result: Loaded) -> None:
        """Tells the breaker: a store that brings nothing within the budget has failed as one that raises."""
        shared = self._shared
        if result.late:
            shared.counters.add(loads_late=1)
        if result.late and not result.loaded_tokens:
            if not self._failed:
                shared.warnings.failed("loading", "nothing came within the budget", shared.reading.failed())
        elif not self._failed:
            shared.reading.succeeded()

    def _give_back(self, parts: Sequence[_Part]) -> None:
        for part in parts:
            self._shared.counters.add(late_blocks=len(part.addrs))
            self._shared.memory.free(part.addrs)


def _divided(wanted: Sequence[_Part], parts: Sequence[_Part]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Blocks of the parts that have ended.

    Returns:
        Those of the prefix of `wanted` that has come without a gap, and all others.
    """
    taken = 0
    for part in wanted:
        taken += part.read if part.ended else 0
        if not part.ended or part.read < len(part.addrs):
            break
    addrs = [part.addrs for part in parts if part.ended]
    ended = np.concatenate(addrs) if addrs else np.empty(0, np.uint64)
    return ended[:taken], ended[taken:]
