"""A pool and a store, joined: what falls out of the pool can be found in the store, by this pool and by others."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpool.arguments import int_from, seconds_from, shown
from kvpool.errors import ArgumentError, ArgumentTypeError, ClosedError, ForkError
from kvpool.pool import Pool
from kvpool.storage.admission import Admission, Always, OnSecondUse
from kvpool.storage.budget import Breaker, ByteBudget
from kvpool.storage.handles import StorageHandle
from kvpool.storage.keys import ContentKeys, tokens_from
from kvpool.storage.loading import Load, Loaded
from kvpool.storage.memory import BlockMemory
from kvpool.storage.saving import SAVED_WITHIN_S, Save, Saved, Wanted
from kvpool.storage.shared import Shared, Warnings
from kvpool.storage.stats import Counters, StorageStats
from kvpool.storage.store import Store
from kvpool.storage.workers import Alarm, ReadsFirst, Workers
from kvpool.storage.write_behind import WriteBehind
from kvpool.types import TokenVector

__all__ = ["Storage", "Write"]

Write: TypeAlias = Literal["never", "on_second_use", "always"]

_POLICIES: Final = {"on_second_use": OnSecondUse, "always": Always}
_THREADS_MAX: Final = 64
_LOADS_MAX: Final = 4096  # parts of loads that wait
_SAVES_MAX: Final = 1 << 24  # tokens of saves that wait
_JOIN_S: Final = 2.0


class Storage:
    """Loads prompts from a store into a pool, and saves what the pool has to the store.

        store = DirectoryStore("/mnt/kv")
        storage = Storage(pool, store, model="llama-3.1-8b")
        storage.load(tokens, budget_s=0.2).wait()      # then pool.match(tokens), as ever

    All methods are thread-safe, and none of them waits for the store: its calls run on a bounded number of threads. A
    store that is slow or gone costs a load its budget at most, and after three such loads nothing at all for a while.
    Errors of the store are counted and logged once in a while, and no load fails by them.

    Blocks that `insert` has cached with ``filled=False`` are not saved before they are filled.

    It does not own the pool or the store: close this first. A pool of a logical instance has no memory here: each of
    its ranks that is a pool by itself can have a Storage, with its `rank_slice`.

    Args:
        pool: The pool. Content goes to and comes from its blocks in DRAM; blocks that the CPU cannot read, of a GPU or
            of an engine, go by way of a few of them.
        store: For example a `DirectoryStore`.
        model: A fingerprint of the weights and of all that changes what they compute; by default the pool's setting
            ``model``.
        rank_slice: Which part of the model's heads and layers the pool's blocks hold; "" for all of them.
        secret: The key of the content keys; by default the pool's setting ``secret``. Pools that share a store need the
            same. Without it, all who can list the store can tell whether it has a certain prompt.
        write: What is saved by itself: "on_second_use": what was used twice (see `OnSecondUse`); "always": all that the
            pool stores; "never": only what `save` names; or an `Admission`.
        write_bytes_s: The most bytes a second that are written, by all writers together; None: no limit. A second's
            worth may go at once.
        read_threads: Threads that read, at most.
        write_threads: Threads that write, at most. They wait while loads read.
        store_timeout_s: The deadline of each call of the store that no load waits for.

    Raises:
        ArgumentError, ArgumentTypeError: A bad argument; no `model`.
        Unsupported: The pool has no memory that the CPU can access.
        StateError: The pool's memory is in ranks.
    """

    def __init__(
        self,
        pool: Pool,
        store: Store,
        *,
        model: str | None = None,
        rank_slice: str = "",
        secret: str | None = None,
        write: Write | Admission = "on_second_use",
        write_bytes_s: float | None = None,
        read_threads: int = 4,
        write_threads: int = 1,
        store_timeout_s: float = 30.0,
    ) -> None:
        if not isinstance(pool, Pool):
            raise ArgumentTypeError(f"pool must be a Pool, not {type(pool).__name__}")
        if secret is not None and not isinstance(secret, str):
            raise ArgumentTypeError(f"secret must be a str, not {type(secret).__name__}")
        if not all(callable(getattr(store, name, None)) for name in ("exists", "get", "put", "stats")):
            raise ArgumentTypeError(f"store must be a Store, not {type(store).__name__} ({shown(store)})")
        admission = _admission_of(write)
        keys = ContentKeys(
            model=pool.settings.model if model is None else model,
            layout=pool.kv_layout,
            rank_slice=rank_slice,
            secret=(pool.settings.secret if secret is None else secret).encode("utf-8", "surrogatepass"),
        )
        self._process = os.getpid()
        self._closed = False
        self._behind: WriteBehind | None = None
        self._shared = Shared(
            pool=pool, store=store, keys=keys, memory=BlockMemory(pool), counters=Counters(),
            readers=Workers("kvpool-storage-read", _threads(read_threads, "read_threads"), _LOADS_MAX),
            writers=Workers("kvpool-storage-write", _threads(write_threads, "write_threads"), _SAVES_MAX),
            alarm=Alarm("kvpool-storage-alarm"), reads_first=ReadsFirst(),
            budget=ByteBudget(_budget(write_bytes_s), time.monotonic),
            reading=Breaker(time.monotonic), writing=Breaker(time.monotonic), warnings=Warnings(),
            store_timeout_s=seconds_from(store_timeout_s, "store_timeout_s"), closing=threading.Event(),
        )  # fmt: skip
        if admission is not None:
            self._behind = WriteBehind(self._shared, admission)

    def load(self, tokens: TokenVector, namespace: str = "", *, budget_s: float = 1.0) -> StorageHandle[Loaded]:
        """Brings the longest prefix of a prompt that the pool and the store have together into the pool.

        Returns at once. The handle ends within the budget: what has come by then is cached, and what comes later is
        dropped. When the pool has the whole prompt, or reading is switched off, it has ended already. A load counts as
        a use of what the pool has.

        Args:
            tokens: The prompt, as in `Pool.match`.
            namespace: As in `Pool.match`.
            budget_s: Seconds.

        Returns:
            A handle to wait for, await or cancel; its result is a `Loaded`. It fails only if the pool does.

        Raises:
            ArgumentError, ArgumentTypeError: As `Pool.match`.
            ClosedError, ForkError: This, or the pool, is closed, or belongs to the parent process.
        """
        until = time.monotonic() + seconds_from(budget_s, "budget_s")
        wide, shared = self._checked(tokens), self._shared
        hit = shared.pool.match(wide, namespace)
        shared.counters.add(loads=1)
        have = len(hit.addrs)
        if self._behind is not None:
            self._behind.used(wide, namespace, have)
        load = Load(shared, wide, namespace, hit, until, self._missed)
        whole = have == len(wide) // shared.pool.kv_layout.block_tokens
        if whole or not shared.reading.allows():
            shared.counters.add(skipped_loads=0 if whole else 1)
            load.handle.resolve(Loaded(hit.tokens, 0, late=False))
            hit.close()
        else:
            load.begin()
        return load.handle

    def save(self, tokens: TokenVector, namespace: str = "", *, timeout: float | None = None) -> StorageHandle[Saved]:
        """Writes those blocks of a prompt that the pool has and the store lacks. They stay pinned until it ends.

        Returns at once. Its bytes count in `write_bytes_s` as those of all writers, and it gives way to loads.

        Args:
            tokens: The prompt, as in `Pool.match`.
            namespace: As in `Pool.match`.
            timeout: Seconds; None: five minutes.

        Returns:
            A handle to wait for, await or cancel; its result is a `Saved`. It fails with StoreFailed or
            DeadlineExceeded, within `timeout` also if the store hangs; what was written by then stays.

        Raises:
            ArgumentError, ArgumentTypeError, ClosedError, ForkError: As `load`.
        """
        until = time.monotonic() + (SAVED_WITHIN_S if timeout is None else seconds_from(timeout, "timeout"))
        wide = self._checked(tokens)
        held = self._shared.pool.match(wide, namespace)
        save = Save(self._shared, Wanted(wide, namespace, range(len(held.addrs)), until), held)
        save.begin()
        return save.handle

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until the policy has heard of all that the pool has stored so far, and the writers have no work left.

        It does not wait for blocks whose content is still to come.

        Args:
            timeout: Seconds; None: the setting ``timeout_s`` of the pool.

        Returns:
            Whether that was so in time.
        """
        self._check_open()
        seconds = self._shared.pool.settings.timeout_s if timeout is None else seconds_from(timeout, "timeout")
        until = time.monotonic() + seconds
        if self._behind is not None and not self._behind.flush(until):
            return False
        return self._shared.writers.wait_idle(until)

    def stats(self) -> StorageStats:
        """What it has done so far."""
        shared = self._shared
        return shared.counters.read(
            reading_off=shared.reading.off, writing_off=shared.writing.off, store=shared.store.stats()
        )

    def close(self) -> None:
        """Ends it. Idempotent; closes neither the pool nor the store.

        Loads and saves that are under way end at once. A call of the store that hangs is left behind after two seconds:
        its thread ends with the call, and frees the blocks that it had then.
        """
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        shared = self._shared
        shared.closing.set()
        until = time.monotonic() + _JOIN_S
        if self._behind is not None:
            self._behind.close(until)
        shared.alarm.close()
        shared.writers.close(until)
        shared.readers.close(until)
        shared.memory.release()

    def _missed(self, keys: Sequence[bytes]) -> None:
        if self._behind is not None:
            self._behind.missed(keys)

    def _checked(self, tokens: TokenVector) -> npt.NDArray[np.int64]:
        self._check_open()
        return tokens_from(tokens)

    def _check_open(self) -> None:
        if os.getpid() != self._process:
            raise ForkError("this storage belongs to the parent process: make one after the fork")
        if self._closed:
            raise ClosedError("this storage is closed")

    def __enter__(self) -> Storage:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes."""
        self.close()


def _admission_of(write: object) -> Admission | None:
    if isinstance(write, str):
        if write not in ("never", *_POLICIES):
            raise ArgumentError(
                f"write is {shown(write)}; it must be one of never, {', '.join(_POLICIES)}, or an Admission"
            )
        return None if write == "never" else _POLICIES[write]()
    if not all(callable(getattr(write, name, None)) for name in ("stored", "used", "not_saved")):
        raise ArgumentTypeError(f"write must be a str or an Admission, not {type(write).__name__}")
    return write  # type: ignore[return-value]


def _threads(value: object, what: str) -> int:
    number = int_from(value, what)
    if not 1 <= number <= _THREADS_MAX:
        raise ArgumentError(f"{what} is {number}; it must be from 1 to {_THREADS_MAX}", value=number)
    return number


def _budget(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ArgumentTypeError(f"write_bytes_s must be a number, not {type(value).__name__} ({shown(value)})")
    if not 1 <= value < 1 << 60:
        raise ArgumentError(f"write_bytes_s is {shown(value)}; it must be at least 1 byte a second")
    return float(value)
