"""A server in another process, and how the process that started it talks to it.

`Instance` is the handle of the one who started the process: it asks for one method of the server after another, over a
pipe. Blocks never go through that pipe: pools send them to each other.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, ClassVar, Protocol


class Serving(Protocol):
    """What a process can run: an object that is made of a name and settings. Its methods are what can be asked.

    Attributes:
        imports: The modules that it needs. They are imported once, and every process is forked from there.
    """

    imports: ClassVar[Sequence[str]]

    def __init__(self, name: str, **settings: Any) -> None: ...

    def close(self) -> None: ...


class Instance:
    """A server in another process. Start several, then wait for them: they come up side by side.

    Ends with the one who started it, whatever becomes of that: by close(), by kill(), or because the pipe has ended.
    """

    def __init__(self, name: str, kind: type[Serving], **settings: Any) -> None:
        """Starts it; the first answer() says that it is up. The settings are for its pool."""
        self.name = name
        # Forked from a process that has imported these modules and done nothing else: it is up in a moment, also when
        # it comes back. Nothing is shared but the machine.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(kind.imports))
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs, kind, name, settings), name=name, daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def ask(self, method: str, *arguments: Any, within_s: float = 20.0) -> Any:
        """Calls a method of the server there; returns what it returns, and raises what it raises."""
        self.order(method, *arguments)
        return self.answer(within_s)

    def order(self, method: str, *arguments: Any) -> None:
        """Calls it, and does not wait: answer() does."""
        self._pipe.send((method, arguments))

    def answer(self, within_s: float = 20.0) -> Any:
        if not self._pipe.poll(within_s):
            raise TimeoutError(f"{self.name} has not answered within {within_s} s")
        try:
            worked, value, where = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            raise ChildProcessError(f"the process of {self.name} has ended") from None
        if not worked:
            raise value from RuntimeError(f"in the process of {self.name}:\n{where}")
        return value

    def kill(self) -> float:
        """Does a kill -9. Returns when (CLOCK_MONOTONIC, which is the same for all processes)."""
        at = time.monotonic()
        self._process.kill()
        self._process.join()
        return at

    def close(self) -> None:
        """Ends it, kindly at first. Idempotent."""
        self._pipe.close()
        self._process.join(2.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _run(pipe: Connection, kind: type[Serving], name: str, settings: dict[str, Any]) -> None:
    """What the process does: one call after another, until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who started it, who ends this process
    with contextlib.suppress(EOFError, OSError):
        try:
            server = kind(name, **settings)
        except Exception as error:
            pipe.send((False, error, traceback.format_exc()))
            return
        pipe.send((True, None, ""))
        with contextlib.closing(server):
            while True:
                method, arguments = pipe.recv()
                try:
                    answer = (True, getattr(server, method)(*arguments), "")
                except Exception as error:
                    answer = (False, error, traceback.format_exc())
                pipe.send(answer)
