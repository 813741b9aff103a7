"""One load: the longest prefix that the pool and the store have together, within a budget of time.

caller      match: what the pool has stays pinned until the end
a reader    keys, which of the others the store has, blocks for them
readers     each reads one part of them into its blocks
the last reader, or the alarm at the end of the budget
            insert the prefix that has come; free the other blocks

L1  A part's blocks belong to its reader until that has ended. So a part that is late frees its blocks itself, and
    nobody else does: a read that comes late never writes into a block of somebody else.
L2  Exactly one thread ends the load: the one that sets `_ended`.
L3  A call of the store has a little less time than the load, so that what it has read by its deadline is in time.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvpool.errors import DeadlineExceeded, Error
from kvpool.index import Match
from kvpool.storage.answers import are_stored, read_into
from kvpool.storage.handles import StorageHandle
from kvpool.storage.shared import Shared

__all__ = ["Load", "Loaded"]

_ASKED_AT_ONCE: Final = 64  # keys; the first that the store lacks ends the questions
_PART_BYTES_MIN: Final = 256 << 10  # that one reader reads, where there are as many readers as parts
_MARGIN: Final = 0.1  # of the time that is left: for what follows a call of the store
_MARGIN_MAX_S: Final = 0.02
_FAIR_S: Final = 0.01  # with less time than this no store can show that it works


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
        missed: Told the keys that the store does not have.
    """

    def __init__(
        self,
        shared: Shared,
        tokens: npt.NDArray[np.int64],
        namespace: str,
        hit: Match,
        until: float,
        missed: Callable[[Sequence[bytes]], None],
    ) -> None:
        self.handle: StorageHandle[Loaded] = StorageHandle()
        self._shared = shared
        self._tokens = tokens
        self._namespace = namespace
        self._hit = hit
        self._until = until
        self._missed = missed
        self._lock = threading.Lock()
        self._ended = False
        self._parts: list[_Part] = []
        self._first_call: float | None = None  # of the store (time.monotonic)
        self._answered = False  # a call of the store has returned
        self._failed = False  # one has raised
        self._cut = False  # the budget has ended one, or come before it

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
        except Exception as error:  # the pool's, or a bug
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
            try:
                found = are_stored(self._shared.store, part, self._time_left())
            except Exception as error:  # whatever a store raises
                self._store_failed(error)
                return first
            self._answered = True
            self._shared.counters.add(asked_blocks=len(part))
            if not all(found):
                end = first + found.index(False)
                self._missed(keys[end:])
                return end
        return len(keys)

    def _time_left(self) -> float:
        """The seconds that the next call of the store has (L3); DeadlineExceeded if none are left."""
        now = time.monotonic()
        left = self._until - now
        left -= min(_MARGIN * left, _MARGIN_MAX_S)
        if left <= 0 or self._ended:
            raise DeadlineExceeded("no time is left")
        if self._first_call is None:
            self._first_call = now
        return left

    def _parts_of(self, keys: Sequence[bytes]) -> list[_Part]:
        """Blocks for as many of them as the pool has room for, in parts."""
        memory = self._shared.memory
        addrs = memory.alloc(len(keys)) if len(keys) and not self._ended else np.empty(0, np.uint64)
        keys = keys[: len(addrs)]
        each = -(-len(addrs) // self._shared.readers.threads_max)
        step = min(memory.batch_blocks, max(each, _PART_BYTES_MIN // memory.block_bytes))
        return [_Part(keys[at : at + step], addrs[at : at + step]) for at in range(0, len(addrs), step)]

    def _read(self, part: _Part) -> None:
        read = 0
        try:
            contents = [self._shared.memory.content(int(address)) for address in part.addrs]
            left = self._time_left()
            until = time.monotonic() + left
            found = read_into(self._shared.store, part.keys, contents, left)
            self._answered = True
            read = found.index(False) if False in found else len(found)
            if read < len(found):
                self._not_read([key for key, came in zip(part.keys, found, strict=True) if not came], until)
        except Exception as error:  # whatever a store raises
            self._store_failed(error)
        finally:
            self._part_ended(part, read)

    def _not_read(self, keys: Sequence[bytes], until: float) -> None:
        """The store has not brought these: it lost them since it was asked, or had no time for them."""
        if time.monotonic() >= until:
            self._cut = True
        else:
            self._missed(keys)

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
        """A call of the store has failed, or had no time. The breaker hears of one failure of a load."""
        if isinstance(error, DeadlineExceeded) or time.monotonic() >= self._until:
            self._cut = True
            return
        with self._lock:
            first, self._failed = not self._failed, True
        self._shared.counters.add(read_errors=1)
        self._shared.warnings.failed("loading", error, first and self._shared.reading.failed())

    # ---- the end

    def _end(self, *, late: bool = False, cancelled: bool = False, error: Exception | None = None) -> None:
        """Inserts what has come, and gives the rest back."""
        with self._lock:
            if self._ended:
                return
            self._ended = True  # L2
            taken, rest = _divided([] if cancelled or error is not None else self._parts, self._parts)
        self._shared.reads_first.end()
        try:
            self._shared.memory.free(rest)
            result = self._inserted(taken, late or self._cut)
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
        """Tells the breaker: a store that brings nothing within a fair budget has failed as one that raises."""
        shared = self._shared
        if result.late:
            shared.counters.add(loads_late=1)
        if self._failed:
            return
        if result.late and not result.loaded_tokens:
            if self._first_call is not None and self._until - self._first_call >= _FAIR_S:
                shared.warnings.failed("loading", "nothing came within the budget", shared.reading.failed())
        elif self._answered:
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
