"""One save: those blocks of a prompt that the pool has and the store lacks.

caller      match, of a save that is named: what it names stays pinned until the end
a writer    in batches: which of them the store lacks, copies of those; then block by block to the store
the writer, the alarm at the deadline or at the storage's end, or who cancels it
            the end: exactly one of them sets `_ended`. A call of the store that is under way then works on a copy.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from kvpool.errors import Cancelled, ClosedError, DeadlineExceeded, Error, StoreFailed
from kvpool.index import Match
from kvpool.storage.answers import are_stored, put_one
from kvpool.storage.handles import StorageHandle
from kvpool.storage.shared import Shared

__all__ = ["SAVED_WITHIN_S", "Save", "Saved", "Wanted"]

SAVED_WITHIN_S: Final = 300.0  # what was not saved by then is left, unless the caller says otherwise
_STEP_S: Final = 0.05  # that a block waits for loads at most; and between two looks at whether the save has ended
_CLOSED: Final = "this storage is closed"
_LATE: Final = "the save has not ended by its deadline"

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Saved:
    """What a save has ended with.

    Attributes:
        saved: Blocks newly written.
        present: Blocks that the store had already.
        gone: Blocks that had left the pool, or had no content yet, when their turn came.
    """

    saved: int
    present: int
    gone: int


@dataclass(frozen=True)
class Wanted:
    """Blocks of a prompt that are to be saved.

    Attributes:
        tokens: The prompt.
        namespace: Of the prompt.
        positions: Of the blocks.
        until: When to give up (time.monotonic).
        keys: Of the blocks; None: not known yet.
        tries: How often their content was still to come.
    """

    tokens: npt.NDArray[np.int32] | npt.NDArray[np.int64]
    namespace: str
    positions: Sequence[int]
    until: float
    keys: Sequence[bytes] | None = None
    tries: int = 0


class Save:
    """A save under way.

    Args:
        shared: Of the Storage.
        wanted: The blocks.
        held: Pins them; closed at the end. None: those that are evicted before their turn are left out.
        not_saved: Told the keys that were not saved, where they are known.
        put_off: Told the blocks whose content is still to come. None: they count as gone.
    """

    def __init__(
        self,
        shared: Shared,
        wanted: Wanted,
        held: Match | None = None,
        not_saved: Callable[[Sequence[bytes]], None] | None = None,
        put_off: Callable[[Wanted], None] | None = None,
    ) -> None:
        self.handle: StorageHandle[Saved] = StorageHandle()
        self._shared = shared
        self._wanted = wanted
        self._held = held
        self._not_saved = not_saved
        self._put_off = put_off
        self._lock = threading.Lock()
        self._ended = False
        self._left = dict.fromkeys(wanted.positions)
        self._keys = {} if wanted.keys is None else dict(zip(wanted.positions, wanted.keys, strict=True))
        self._saved = self._present = self._gone = 0

    def begin(self) -> None:
        """Lets a writer do it; the handle fails if too many wait."""
        self._shared.counters.add(saves=1)
        if not self._shared.writers.submit(self._run, self._out_of_time, max(1, len(self._wanted.tokens))):
            closing = self._shared.closing.is_set()
            self._end(ClosedError(_CLOSED) if closing else StoreFailed("too many saves wait", errno=0))
            return
        alarm = weakref.WeakMethod(self._out_of_time)  # a save that has ended need not stay until its deadline
        self._shared.alarm.at(self._wanted.until, lambda: call() if (call := alarm()) is not None else None)
        self.handle.on_cancel(lambda: self._end(Cancelled("cancelled by the caller")))

    # ---- the writer

    def _run(self) -> None:
        try:
            self._check()
            if not self._keys:
                keys = self._shared.keys.of_tokens(self._wanted.tokens, self._wanted.namespace)
                self._keys = {position: keys[position] for position in self._wanted.positions}
            step = self._shared.memory.batch_blocks
            for first in range(0, len(self._wanted.positions), step):
                self._batch(self._wanted.positions[first : first + step])
        except Error as error:
            self._end(error)
        except Exception as error:
            self._end(StoreFailed(f"saving has failed by a bug: {error!r}", errno=0))
            raise
        else:
            self._end(None)

    def _batch(self, batch: Sequence[int]) -> None:
        shared = self._shared
        if not shared.writing.allows():
            raise StoreFailed("writing to the store is switched off for a while, because it kept failing", errno=0)
        self._give_way()
        found = self._call(lambda timeout: are_stored(shared.store, [self._keys[at] for at in batch], timeout))
        present = [at for at, there in zip(batch, found, strict=True) if there]
        self._count(present, present=len(present))
        missing = [at for at, there in zip(batch, found, strict=True) if not there]
        if not missing:
            return
        copies = shared.memory.copies(self._wanted.tokens, self._wanted.namespace, missing)
        self._leave_out([at for at in missing if at not in copies.found], copies.unfilled)
        for position, content in copies.found.items():
            self._give_way()  # block by block, so a read that begins waits for one at most
            self._wait_for_budget()
            new = self._put(position, content)
            shared.writing.succeeded()  # a store that only answers questions does not write
            self._count([position], saved=int(new), present=int(not new))

    def _put(self, position: int, content: list[memoryview] | Sequence[memoryview]) -> bool:
        return self._call(lambda timeout: put_one(self._shared.store, self._keys[position], content, timeout))

    def _leave_out(self, positions: Sequence[int], unfilled: Sequence[int]) -> None:
        """Blocks of which there is no copy: the pool has evicted them, or their content is still to come."""
        later = sorted(unfilled) if self._put_off is not None else []
        gone = sorted({*positions} - {*later})
        with self._lock:
            if self._ended:
                return
            for position in positions:
                del self._left[position]
            self._gone += len(positions)
        self._shared.counters.add(gone_blocks=len(gone))
        if gone and self._not_saved is not None:
            self._not_saved([self._keys[at] for at in gone])
        if later and self._put_off is not None:
            wanted = self._wanted
            keys = [self._keys[at] for at in later]
            self._put_off(
                Wanted(wanted.tokens, wanted.namespace, later, wanted.until, keys, wanted.tries + 1)
            )  # fmt: skip

    def _count(self, positions: Sequence[int], *, saved: int = 0, present: int = 0) -> None:
        with self._lock:
            for position in positions:
                self._left.pop(position, None)
            self._saved += saved
            self._present += present
        self._shared.counters.add(
            saved_blocks=saved, saved_bytes=saved * self._shared.memory.block_bytes, present_blocks=present
        )

    def _call(self, call: Callable[[float], _Result]) -> _Result:
        """Calls the store. Whatever it raises becomes StoreFailed, and counts, if it is not for the save's deadline."""
        timeout = self._check()
        try:
            return call(timeout)
        except Exception as error:
            late = isinstance(error, DeadlineExceeded) or time.monotonic() >= self._wanted.until
            if late and timeout < self._shared.store_timeout_s:  # of the caller: it says nothing about the store
                raise DeadlineExceeded(_LATE) from error
            self._shared.counters.add(write_errors=1)
            self._shared.warnings.failed("saving", error, self._shared.writing.failed())
            if isinstance(error, StoreFailed):
                raise
            raise StoreFailed(f"writing to the store failed: {error}", errno=0) from error

    def _give_way(self) -> None:
        """Waits while loads read, but not for long: there may always be one."""
        self._shared.reads_first.wait(min(time.monotonic() + _STEP_S, self._wanted.until))
        self._check()

    def _wait_for_budget(self) -> None:
        """Waits until a block may be written. One that is not written takes nothing from others."""
        size = self._shared.memory.block_bytes
        until = time.monotonic() + self._shared.budget.take(size)
        try:
            while (wait := until - time.monotonic()) > 0:
                self._check()
                time.sleep(min(wait, _STEP_S))
            self._check()
        except BaseException:
            self._shared.budget.give_back(size)
            raise

    def _check(self) -> float:
        """The seconds that the next call of the store has.

        Raises:
            DeadlineExceeded: None are left.
            Cancelled: It has ended.
            ClosedError: The storage is being closed.
        """
        left = self._wanted.until - time.monotonic()
        if self._shared.closing.is_set():
            raise ClosedError(_CLOSED)
        if self._ended:
            raise Cancelled("the save has ended")
        if left <= 0:
            raise DeadlineExceeded(_LATE)
        return min(left, self._shared.store_timeout_s)

    # ---- the end

    def _out_of_time(self) -> None:
        closing = self._shared.closing.is_set()
        self._end(ClosedError(_CLOSED) if closing else DeadlineExceeded(_LATE))

    def _end(self, error: Error | None) -> None:
        """Gives the pins back, and says what was not saved."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            left = list(self._left)
            result = Saved(self._saved, self._present, self._gone)
        if self._held is not None:
            self._held.close()
        self._shared.counters.add(dropped_blocks=len(left))
        if left and self._keys and self._not_saved is not None:
            self._not_saved([self._keys[position] for position in left])
        if error is None:
            self.handle.resolve(result)
        else:
            self.handle.fail(error)
