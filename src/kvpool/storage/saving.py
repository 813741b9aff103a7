"""One save: those blocks of a prompt that the pool has and the store lacks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from kvpool.errors import Cancelled, ClosedError, DeadlineExceeded, Error, StoreFailed
from kvpool.index import Match
from kvpool.storage.handles import StorageHandle
from kvpool.storage.shared import Shared

__all__ = ["Save", "Saved"]

_STEP_S: Final = 0.05  # between two looks at whether a save was cancelled, while it waits
_CLOSED: Final = "this storage is closed"

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Saved:
    """What a save has ended with.

    Attributes:
        saved: Blocks newly written.
        present: Blocks that the store had already.
        gone: Blocks that had left the pool when their turn came.
    """

    saved: int
    present: int
    gone: int


class Save:
    """A save under way.

    Args:
        shared: Of the Storage.
        tokens: The prompt.
        namespace: Of the prompt.
        positions: Of the blocks to save.
        until: When to give up (time.monotonic).
        held: Pins them; closed at the end. None: those that are evicted before their turn are left out.
        not_saved: Told the keys that were not saved.
    """

    def __init__(
        self,
        shared: Shared,
        tokens: npt.NDArray[np.int32] | npt.NDArray[np.int64],
        namespace: str,
        positions: Sequence[int],
        until: float,
        held: Match | None = None,
        not_saved: Callable[[Sequence[bytes]], None] | None = None,
    ) -> None:
        self.handle: StorageHandle[Saved] = StorageHandle()
        self._shared = shared
        self._tokens = tokens
        self._namespace = namespace
        self._positions = positions
        self._until = until
        self._held = held
        self._not_saved = not_saved

    def begin(self) -> None:
        """Lets a writer do it; the handle fails if too many wait."""
        self._shared.counters.add(saves=1)
        if not self._shared.writers.submit(self._run, self._drop, max(1, len(self._tokens))):
            self._drop()

    def _drop(self) -> None:
        closing = self._shared.closing.is_set()
        self._finish([], len(self._positions), ClosedError(_CLOSED) if closing else StoreFailed("too many saves wait"))

    def _run(self) -> None:
        left = list(self._positions)
        keys: list[bytes] = []
        saved = present = gone = 0
        try:
            keys = self._shared.keys.of_tokens(self._tokens, self._namespace)
            while left:
                batch = left[: self._shared.memory.batch_blocks]
                done = self._batch(keys, batch)
                saved, present, gone = saved + done.saved, present + done.present, gone + done.gone
                del left[: len(batch)]
        except Error as error:
            self._finish([keys[position] for position in left], len(left), error)
        else:
            self.handle.resolve(Saved(saved, present, gone))
            self._finish([], 0, None)

    def _finish(self, not_saved: Sequence[bytes], dropped: int, error: Error | None) -> None:
        if self._held is not None:
            self._held.close()
        if not_saved and self._not_saved is not None:
            self._not_saved(not_saved)
        self._shared.counters.add(dropped_blocks=dropped)
        if error is not None:
            self.handle.fail(error)

    def _batch(self, keys: Sequence[bytes], batch: Sequence[int]) -> Saved:
        shared = self._shared
        if not shared.writing.allows():
            raise StoreFailed("writing to the store is switched off for a while, because it kept failing")
        self._wait_for_reads()
        found = self._call(shared.store.exists, [keys[position] for position in batch])
        missing = [position for position, there in zip(batch, found, strict=True) if not there]
        self._wait_for_budget(len(missing) * shared.memory.block_bytes)
        saved = gone = 0
        if missing:
            copies = shared.memory.copies(self._tokens, self._namespace, missing)
            gone = len(missing) - len(copies.found)
            for position, content in copies.found.items():
                self._wait_for_reads()  # block by block, so a read that begins waits for one at most
                saved += self._call(shared.store.put, [keys[position]], [content])
        shared.writing.succeeded()
        present = len(batch) - saved - gone
        shared.counters.add(
            saved_blocks=saved, saved_bytes=saved * shared.memory.block_bytes, present_blocks=present, gone_blocks=gone
        )
        return Saved(saved, present, gone)

    def _call(self, call: Callable[..., _Result], *arguments: object) -> _Result:
        """Calls the store. Whatever it raises becomes StoreFailed, and counts."""
        timeout = self._left()
        try:
            return call(*arguments, timeout=timeout)
        except Exception as error:
            self._shared.counters.add(write_errors=1)
            self._shared.warnings.failed("saving", error, self._shared.writing.failed())
            if isinstance(error, StoreFailed):
                raise
            raise StoreFailed(f"writing to the store failed: {error}") from error

    def _wait_for_reads(self) -> None:
        while not self._shared.reads_first.wait(min(time.monotonic() + _STEP_S, self._until)):
            self._left()

    def _wait_for_budget(self, size: int) -> None:
        until = time.monotonic() + self._shared.budget.take(size)
        while (wait := until - time.monotonic()) > 0:
            self._left()
            time.sleep(min(wait, _STEP_S))

    def _left(self) -> float:
        """The seconds that the next call of the store has.

        Raises:
            DeadlineExceeded: None are left.
            Cancelled: The save was cancelled.
            ClosedError: The storage is being closed.
        """
        left = self._until - time.monotonic()
        if self.handle.done():
            raise Cancelled("cancelled by the caller")
        if self._shared.closing.is_set():
            raise ClosedError(_CLOSED)
        if left <= 0:
            raise DeadlineExceeded("the save has not ended by its deadline")
        return min(left, self._shared.store_timeout_s)
