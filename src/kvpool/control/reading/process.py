"""The router's handle of a process that reads long bodies."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import numpy as np

from kvpool.control.reading.prompts import Kind, Reading, Unreadable
from kvpool.control.reading.worker import ANSWER, KINDS, NO_SESSION, REQUEST, Status, receive

__all__ = ["NotRead", "ReaderProcess"]

_STOP_S: Final = 5.0


class NotRead(Exception):
    """The process could not read the body, took too long, or died. A request can be routed without its prompt."""


class ReaderProcess:
    """One process, started by the first call, and again after it died or was late. For one thread at a time.

    Args:
        tokenizer: A tokenizer.json; None for four bytes a token.
        prompt_bytes_max: As in `read_prompt`.
    """

    def __init__(self, tokenizer: Path | None, prompt_bytes_max: int) -> None:
        self._tokenizer = tokenizer
        self._prompt_bytes_max = prompt_bytes_max
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None

    def read(self, kind: Kind, session: str | None, body: bytes | bytearray, timeout_s: float) -> Reading:
        """As `read_prompt`. Blocks.

        Args:
            kind: Of the endpoint; not "other".
            session: From the headers.
            body: JSON.
            timeout_s: For the whole call.

        Raises:
            Unreadable: The body is no JSON object.
            NotRead: It was not read.
        """
        try:
            return self._ask(kind, session, body, time.monotonic() + timeout_s)
        except (OSError, ValueError) as error:
            self.close()
            raise NotRead(f"{type(error).__name__}: {error}") from error

    def start(self) -> socket.socket:
        """Starts the process unless it runs. Raises OSError if that fails."""
        if self._sock is not None:
            return self._sock
        ours, theirs = socket.socketpair()
        with theirs:
            tokenizer = None if self._tokenizer is None else str(self._tokenizer)
            arguments = f"{theirs.fileno()}, {tokenizer!r}, {self._prompt_bytes_max}"
            # The same packages as here, and nothing from the folder that the router happens to run in.
            code = f"import sys; sys.path[:] = {sys.path!r}; from kvpool.control.reading.worker import main; "
            command = [sys.executable, "-c", f"{code}main({arguments})"]
            try:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
                )
            except BaseException:
                ours.close()
                raise
        self._sock = ours
        return ours

    def close(self) -> None:
        """Ends the process."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
            self._process = None

    def _ask(self, kind: Kind, session: str | None, body: bytes | bytearray, end: float) -> Reading:
        sock = self.start()

        def hurry() -> None:
            sock.settimeout(max(1e-3, end - time.monotonic()))

        named = b"" if session is None else session.encode()
        hurry()
        sock.sendall(REQUEST.pack(KINDS.index(kind), NO_SESSION if session is None else len(named), len(body)) + named)
        hurry()
        sock.sendall(body)
        hurry()
        head = receive(sock, ANSWER.size)
        if head is None:
            raise ConnectionResetError("the process has ended")
        status, text_bytes, tokens = ANSWER.unpack(head)
        hurry()
        text = bytes(receive(sock, text_bytes) or b"").decode()
        if status == Status.REFUSED:
            raise Unreadable(text)
        if status == Status.UNREAD:
            raise NotRead(text)
        hurry()
        data = receive(sock, 4 * tokens)
        return Reading(np.frombuffer(data or bytearray(4), dtype=np.int32), *json.loads(text))
