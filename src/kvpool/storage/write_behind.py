"""Saves what the pool stores, in the background, as far as an admission policy wants it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpool.errors import ClosedError
from kvpool.index import EventStream, StoredEvent
from kvpool.storage.admission import Admission
from kvpool.storage.shared import Shared

__all__ = ["WriteBehind"]

_log = logging.getLogger("kvpool.storage")

_INTERVAL_S: Final = 0.05
_USES_MAX: Final = 1024  # prompts that wait until the policy hears of their use

Tokens: TypeAlias = "npt.NDArray[np.int32] | npt.NDArray[np.int64]"
Enqueue: TypeAlias = Callable[[Tokens, str, Sequence[int]], None]


class WriteBehind:
    """A thread that hears the pool's KV events, asks the policy, and hands the blocks it chooses to the writers.

    It pins nothing, and what was evicted before its turn is not saved. Thread-safe.

    Args:
        shared: Of the Storage.
        admission: The policy. Called by this thread alone.
        enqueue: Saves blocks of a prompt: tokens, namespace, positions. Must not wait.
    """

    def __init__(self, shared: Shared, admission: Admission, enqueue: Enqueue) -> None:
        self._shared = shared
        self._admission = admission
        self._enqueue = enqueue
        self._uses: deque[tuple[npt.NDArray[np.int64], str, int]] = deque(maxlen=_USES_MAX)
        self._not_saved: deque[Sequence[bytes]] = deque(maxlen=_USES_MAX)
        self._stopping = threading.Event()
        self._changed = threading.Condition()
        self._rounds = 0
        self._ended = False
        self._stream: EventStream = shared.pool.subscribe(include_cached=True)
        self._lost = 0
        self._thread = threading.Thread(target=self._run, name="kvpool-storage-events", daemon=True)
        self._thread.start()

    def used(self, tokens: npt.NDArray[np.int64], namespace: str, blocks: int) -> None:
        """A request has asked for a prompt, of which the pool had so many blocks."""
        if blocks:
            self._uses.append((tokens, namespace, blocks))

    def not_saved(self, keys: Sequence[bytes]) -> None:
        """Blocks that were chosen were not saved."""
        self._not_saved.append(keys)

    def flush(self, until: float) -> bool:
        """Waits until all that happened before this call has been handed to the writers, or this time has come."""
        with self._changed:
            enough = self._rounds + 2  # one that has begun may have missed it
            return self._changed.wait_for(
                lambda: self._rounds >= enough or self._ended, max(0.0, until - time.monotonic())
            )

    def close(self) -> None:
        """Ends it. What was not handed to the writers yet is not saved."""
        self._stopping.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._round()
                with self._changed:
                    self._rounds += 1
                    self._changed.notify_all()
                self._stopping.wait(_INTERVAL_S)
        except ClosedError:
            _log.info("the pool is closed: nothing more is saved")
        except Exception:
            _log.exception("saving what the pool stores has ended by a bug")
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()
            self._stream.close()

    def _round(self) -> None:
        while self._not_saved:
            self._admission.not_saved(self._not_saved.popleft())
        for event in self._stream.drain():
            if isinstance(event, StoredEvent):
                keys = self._shared.keys.of_tokens(event.tokens, event.namespace)
                self._save(event.tokens, event.namespace, self._admission.stored(keys, event.first_block))
        while self._uses:
            tokens, namespace, blocks = self._uses.popleft()
            keys = self._shared.keys.of_tokens(tokens, namespace)[:blocks]
            self._save(tokens, namespace, self._admission.used(keys))
        lost, self._lost = self._stream.lost - self._lost, self._stream.lost
        self._shared.counters.add(lost_events=lost)

    def _save(self, tokens: Tokens, namespace: str, positions: Sequence[int]) -> None:
        if positions:
            self._enqueue(tokens, namespace, positions)
