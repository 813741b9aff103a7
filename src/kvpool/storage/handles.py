"""The handle of a load or a save."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Generic, TypeVar

from kvpool.arguments import seconds_from
from kvpool.errors import Cancelled, DeadlineExceeded, Error

__all__ = ["StorageHandle"]

_Result = TypeVar("_Result")


class StorageHandle(Generic[_Result]):
    """Work under way in `Storage`. Thread-safe. It goes on when the handle is dropped."""

    def __init__(self) -> None:
        """Use `Storage.load` or `Storage.save`."""
        self._future: Future[_Result] = Future()
        self._lock = threading.Lock()
        self._on_end: Callable[[], None] | None = None

    def wait(self, timeout: float | None = None) -> _Result:
        """Waits for the end.

        Args:
            timeout: Seconds; None: until it ends.

        Returns:
            A `Loaded` or a `Saved`.

        Raises:
            DeadlineExceeded: It has not ended yet, and goes on.
            Cancelled: It was cancelled.
            Error: Why it failed.
        """
        try:
            return self._future.result(None if timeout is None else seconds_from(timeout, "timeout"))
        except FutureTimeout as error:
            if isinstance(error, Error):
                raise  # the reason why it failed
            raise DeadlineExceeded(f"not ended after {timeout} s; it goes on") from None

    def done(self) -> bool:
        """Whether it has ended."""
        return self._future.done()

    def cancel(self) -> bool:
        """Ends it at once, with `Cancelled`. What was loaded or saved by then stays, or is given back.

        Returns:
            False if it had ended before.
        """
        with self._lock:
            on_end = self._on_end
        if not self.fail(Cancelled("cancelled by the caller")):
            return False
        if on_end is not None:
            on_end()
        return True

    def exception(self, timeout: float | None = None) -> Exception | None:
        """Waits for the end; why it failed, or None. Raises DeadlineExceeded as `wait`."""
        try:
            self.wait(timeout)
        except Error as error:
            if not self.done():
                raise
            return error
        return None

    def __await__(self) -> Generator[Any, None, _Result]:
        """Waits in a coroutine; raises what wait() raises. Cancelling the task ends the waiting, not the work."""
        return asyncio.shield(asyncio.wrap_future(self._future)).__await__()

    def on_cancel(self, call: Callable[[], None]) -> None:
        """Calls this if it is cancelled, or has been."""
        with self._lock:
            ended = self._future.done()
            if not ended:
                self._on_end = call
        if ended and isinstance(self._future.exception(), Cancelled):
            call()

    def resolve(self, result: _Result) -> bool:
        """Ends it with a result; False if it had ended before."""
        return self._end(lambda: self._future.set_result(result))

    def fail(self, error: Exception) -> bool:
        """Ends it with an error; False if it had ended before."""
        return self._end(lambda: self._future.set_exception(error))

    def _end(self, how: Callable[[], None]) -> bool:
        with self._lock:
            if self._future.done():
                return False
            self._on_end = None
            how()
            return True
