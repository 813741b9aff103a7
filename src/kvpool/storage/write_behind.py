"""Saves what the pool stores, in the background, as far as an admission policy wants it."""

from __future__ import annotations

import logging
import operator
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpool.errors import ClosedError
from kvpool.index import EventStream, StoredEvent
from kvpool.storage.admission import Admission
from kvpool.storage.saving import SAVED_WITHIN_S, Save, Wanted
from kvpool.storage.shared import Shared

__all__ = ["WriteBehind"]

_log = logging.getLogger("kvpool.storage")

_INTERVAL_S: Final = 0.05
_USES_MAX: Final = 1024  # prompts that wait until the policy hears of their use, or that the store lacks them
_PUT_OFF_MAX: Final = 1024  # prompts whose content is still to come
_PUT_OFF_MAX_S: Final = 2.0  # between two looks at one of them

Tokens: TypeAlias = "npt.NDArray[np.int32] | npt.NDArray[np.int64]"


class WriteBehind:
    """A thread that hears the pool's KV events, asks the policy, and hands the blocks it chooses to the writers.

    It pins nothing, and what was evicted before its turn is not saved: the policy hears of it. Blocks whose content is
    still to come are tried again, more and more seldom. Thread-safe.

    Args:
        shared: Of the Storage.
        admission: The policy. Called by this thread alone.
    """

    def __init__(self, shared: Shared, admission: Admission) -> None:
        self._shared = shared
        self._admission = admission
        self._uses: deque[tuple[npt.NDArray[np.int64], str, int]] = deque(maxlen=_USES_MAX)
        self._not_saved: deque[Sequence[bytes]] = deque()  # as many as there were saves and misses in one round
        self._put_off: deque[tuple[float, Wanted]] = deque()
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

    def missed(self, keys: Sequence[bytes]) -> None:
        """A load has looked for blocks that the store lacks. Where too much waits, they will be missed again."""
        if len(self._not_saved) < _USES_MAX:
            self._not_saved.append(keys)

    def put_off(self, wanted: Wanted) -> None:
        """Blocks that were chosen have no content yet."""
        wait = min(_INTERVAL_S * 2**wanted.tries, _PUT_OFF_MAX_S)
        again = time.monotonic() + wait
        if again < wanted.until and len(self._put_off) < _PUT_OFF_MAX:
            self._put_off.append((again, wanted))
        else:
            self._shared.counters.add(gone_blocks=len(wanted.positions))
            self._not_saved.append(wanted.keys or [])

    def flush(self, until: float) -> bool:
        """Waits until all that happened before this call has been handed to the writers, or this time has come."""
        with self._changed:
            enough = self._rounds + 2  # one that has begun may have missed it
            return self._changed.wait_for(
                lambda: self._rounds >= enough or self._ended, max(0.0, until - time.monotonic())
            )

    def close(self, until: float) -> None:
        """Ends it. What was not handed to the writers yet is not saved.

        Args:
            until: When not to wait any more for a policy that hangs (time.monotonic).
        """
        self._stopping.set()
        if self._thread is not threading.current_thread():
            self._thread.join(max(0.0, until - time.monotonic()))

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
            with self._counted():
                self._admission.not_saved(self._not_saved.popleft())
        self._try_again()
        for event in self._stream.drain():
            if isinstance(event, StoredEvent):
                self._choose(event.tokens, event.namespace, None, event.first_block)
        while self._uses:
            tokens, namespace, blocks = self._uses.popleft()
            self._choose(tokens, namespace, blocks, None)
        lost, self._lost = self._stream.lost - self._lost, self._stream.lost
        self._shared.counters.add(lost_events=lost)

    def _try_again(self) -> None:
        now = time.monotonic()
        for _ in range(len(self._put_off)):
            at, wanted = self._put_off.popleft()
            if at <= now:
                self._save(wanted)
            else:
                self._put_off.append((at, wanted))

    def _choose(self, tokens: Tokens, namespace: str, used: int | None, stored_from: int | None) -> None:
        """Asks the policy about a prompt of which blocks were used, or stored, and hands on what it chooses."""
        keys = self._shared.keys.of_tokens(tokens, namespace)[:used]
        positions: list[int] = []
        with self._counted():
            admission = self._admission
            chosen = admission.used(keys) if stored_from is None else admission.stored(keys, stored_from)
            positions = _positions(chosen, len(keys))
        if positions:
            until = time.monotonic() + SAVED_WITHIN_S
            self._save(Wanted(tokens, namespace, positions, until, [keys[at] for at in positions]))

    def _save(self, wanted: Wanted) -> None:
        Save(self._shared, wanted, None, self.not_saved, self.put_off).begin()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Around a call of the policy. If it raises that is counted, and it is asked again about what comes next."""
        try:
            yield
        except Exception as error:  # whatever a policy raises
            self._shared.counters.add(policy_errors=1)
            self._shared.warnings.failed("the admission policy", error)


def _positions(chosen: object, blocks: int) -> list[int]:
    """What a policy has returned, in order and once each; ValueError or TypeError if it is something else."""
    positions = sorted({operator.index(one) for one in chosen})  # type: ignore[attr-defined]
    if positions and not 0 <= positions[0] <= positions[-1] < blocks:
        raise ValueError(f"positions {positions[0]} to {positions[-1]} of a prompt of {blocks} blocks")
    return positions
