"""Calls the application back: a thread that passes on, item by item, what the core has queued for it."""

from __future__ import annotations

import os
import select
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, TypeVar

from kvpool import _core
from kvpool.errors import ArgumentTypeError, ClosedError, StateError
from kvpool.waiting.threads import busy, join

__all__ = ["CallbackSlot", "Dispatcher"]

Item = TypeVar("Item")


class Dispatcher(ABC, Generic[Item]):
    """A callback of a pool, until it is closed. It runs in a dedicated thread, one item after another.

    Use it in a ``with``, or call ``close()``; closing the pool ends it, too.
    """

    def __init__(self, pool: _core.Pool, descriptor: int, callback: Callable[[Item], object], thread: str) -> None:
        """Begins to call back.

        Args:
            pool: The pool that queues the items.
            descriptor: Readable while items wait, or when no more will come. It is duplicated.
            callback: Takes an item.
            thread: Name of the thread.
        """
        self._process = os.getpid()
        self._lock = threading.RLock()  # the wake descriptor is not written to once it is closed
        self._stopping = False
        self._items = os.dup(descriptor)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(
            target=self._run, args=(pool, callback), name=thread, daemon=True
        )  # keeps both alive until it ends
        self._thread.start()

    @abstractmethod
    def _take(self, pool: _core.Pool) -> Item | None:
        """The next item, without waiting; None if no item waits. Raises ClosedError when no more will come."""

    @abstractmethod
    def _failed(self, item: Item) -> None:
        """Called in the handler of an exception that the callback has raised."""

    def close(self) -> None:
        """Ends it: when this returns the callback no longer runs. Idempotent.

        If the callback itself calls this, that is its last run. Called from another callback of a pool or a cluster, or
        from a finalizer that the garbage collector runs, it does not wait for the end, so two callbacks may close each
        other. Waits for a running callback for at most a minute.
        """
        if os.getpid() != self._process:
            return  # a forked child has no thread, and the descriptor would wake the parent's
        with busy, self._lock:
            if not self._stopping:
                self._stopping = True
                os.eventfd_write(self._wake, 1)
        join(self._thread)

    @property
    def closed(self) -> bool:
        """Whether it was closed, or its pool was."""
        return self._stopping

    def __enter__(self) -> Dispatcher[Item]:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes."""
        self.close()

    def _run(self, pool: _core.Pool, callback: Callable[[Item], object]) -> None:
        with busy:
            self._deliver_until_stopped(pool, callback)

    def _deliver_until_stopped(self, pool: _core.Pool, callback: Callable[[Item], object]) -> None:
        poll = select.poll()
        poll.register(self._items, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        try:
            while not self._stopping:
                poll.poll()
                if not self._stopping:
                    self._deliver_all(pool, callback)
        except ClosedError:
            pass
        finally:
            with self._lock:
                self._stopping = True
                os.close(self._items)
                os.close(self._wake)

    def _deliver_all(self, pool: _core.Pool, callback: Callable[[Item], object]) -> None:
        while not self._stopping:
            item = self._take(pool)
            if item is None:
                return
            try:
                callback(item)
            except BaseException:  # also SystemExit and the like: this thread belongs to the pool
                self._failed(item)


Handle = TypeVar("Handle", bound=Dispatcher[Any])


class CallbackSlot(Generic[Handle]):
    """The callback of one kind that a pool may have: at most one at a time."""

    def __init__(self, lock: threading.Lock) -> None:
        """An empty slot. `lock` is held while a callback begins."""
        self._lock = lock
        self._handle: Handle | None = None

    def begin(self, make: Callable[[Callable[[Item], object]], Handle], callback: Callable[[Item], object]) -> Handle:
        """Begins a callback, with the handle that `make` returns.

        Raises:
            ArgumentTypeError: The callback is not callable.
            StateError: There is a callback already. And what `make` raises; then the slot is unchanged.
        """
        if not callable(callback):
            raise ArgumentTypeError(f"callback must be callable, and is {type(callback).__name__}")
        with self._lock:
            if self._handle is not None and not self._handle.closed:
                raise StateError("there is a callback already: close it first")
            self._handle = make(callback)
            return self._handle

    def close(self) -> None:
        """Ends the callback, if there is one."""
        if self._handle is not None:
            self._handle.close()
