"""The process that reads long bodies, so that the router's own threads never wait for it.

It serves the router over a pair of sockets, one request after another, and ends when the router's side is closed.

    request     kind, bytes of the session (or none), bytes of the body; session; body
    answer      status, bytes of the text, number of tokens; text; tokens (int32)
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
from enum import IntEnum
from pathlib import Path
from struct import Struct
from typing import Final

from kvpool.control.reading.prompts import Kind, Tokenizer, Unreadable, load_tokenizer, read_prompt

__all__ = ["ANSWER", "KINDS", "NO_SESSION", "REQUEST", "Status", "main", "receive"]

REQUEST: Final = Struct("<BII")
ANSWER: Final = Struct("<BII")
KINDS: Final[tuple[Kind, ...]] = ("completions", "chat")
NO_SESSION: Final = (1 << 32) - 1
_NICE: Final = 5  # the router goes first


class Status(IntEnum):
    """The outcome of an answer."""

    READ = 0  # the text is all of the reading but its tokens, in their order, as JSON
    REFUSED = 1  # the text says why the body is no JSON object
    UNREAD = 2  # the body was not understood, and the text says why


def main(number: int, tokenizer: str | None, prompt_bytes_max: int) -> None:
    """Reads bodies until the router closes its side.

    Args:
        number: Of the socket's file.
        tokenizer: A tokenizer.json; None for four bytes a token.
        prompt_bytes_max: As in `read_prompt`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the router's; this process ends with it
    gc.disable()  # nothing here has cycles, and a million new objects would be looked through again and again
    os.nice(_NICE)
    with socket.socket(fileno=number) as sock:
        text = load_tokenizer(None if tokenizer is None else Path(tokenizer))
        while (head := receive(sock, REQUEST.size)) is not None:
            kind, session_bytes, body_bytes = REQUEST.unpack(head)
            session = None
            if session_bytes != NO_SESSION:
                session = _received(sock, session_bytes).decode()
            answer = _answer(text, KINDS[kind], session, _received(sock, body_bytes), prompt_bytes_max)
            for part in answer:
                sock.sendall(part)


def receive(sock: socket.socket, size: int) -> bytearray | None:
    """Receives this many bytes; None if the other side closed before the first. Raises OSError if it closed later."""
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        count = sock.recv_into(view[got:])
        if count == 0:
            if got == 0:
                return None
            raise ConnectionResetError("closed in the middle")
        got += count
    return data


def _received(sock: socket.socket, size: int) -> bytearray:
    data = receive(sock, size) if size else bytearray()
    if data is None:
        raise ConnectionResetError("closed in the middle")
    return data


def _answer(text: Tokenizer, kind: Kind, session: str | None, body: bytearray, most: int) -> tuple[bytes, ...]:
    try:
        read = read_prompt(text, kind, session, body, most)
    except Unreadable as error:
        said = str(error).encode()
        return (ANSWER.pack(Status.REFUSED if error.sure else Status.UNREAD, len(said), 0) + said,)
    except Exception as error:  # a bug, or no memory: the router goes on without
        said = f"{type(error).__name__}: {error}".encode(errors="replace")[:4096]
        return (ANSWER.pack(Status.UNREAD, len(said), 0) + said,)
    said = json.dumps(
        [read.session, read.namespace, read.stream, read.ids_namespace, read.salt, read.model, read.lora_path]
    ).encode()
    return ANSWER.pack(Status.READ, len(said), len(read.tokens)) + said, read.tokens.tobytes()
