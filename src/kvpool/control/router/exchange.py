"""One request of one client over ASGI: reads it within limits, and answers it once.

ASGI reports a disconnected client in two ways: `receive` returns `http.disconnect`, and `send` raises. Here both become
`ClientGone`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from re import fullmatch
from typing import Any, Final
from uuid import uuid4

import anyio
from starlette.types import Receive, Scope, Send

from kvpool.control.router.auth import CHALLENGE
from kvpool.control.router.errors import ClientGone, Refusal
from kvpool.control.router.upstream import Headers

__all__ = ["Exchange"]

_JSON: Final = (b"content-type", b"application/json")


class Exchange:
    """A request and its answer.

    Attributes:
        method: Of HTTP.
        path: With the query, unchanged.
        headers: By name in lower case; of several with one name, the last.
        request_id: The client's X-Request-Id if valid, otherwise a new one.
        began_s: Monotonic.
        status: Of the answer that has begun; 0 before.
        sent_bytes: Of the answer's body.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, stall_timeout_s: float) -> None:
        self.began_s = time.monotonic()
        self.method: str = scope["method"]
        query: bytes = scope.get("query_string", b"")
        self.path: bytes = scope.get("raw_path") or scope["path"].encode()
        self.path += b"?" + query if query else b""
        self.raw_headers: Headers = scope["headers"]
        self.headers: Mapping[str, str] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in self.raw_headers
        }
        given = self.headers.get("x-request-id", "")
        self.request_id = given if fullmatch(r"[A-Za-z0-9._:/+=-]{1,128}", given) else uuid4().hex
        self.status = 0
        self.sent_bytes = 0
        self._whole = anyio.Event()  # the body was read
        self._receive = receive
        self._send = send
        self._stall_timeout_s = stall_timeout_s

    @property
    def age_s(self) -> float:
        """Since the request's headers were read."""
        return time.monotonic() - self.began_s

    def check_head(self, bytes_max: int) -> None:
        """Raises Refusal, 431, if path and headers are longer, because the server does not limit a single piece."""
        size = len(self.path) + sum(len(name) + len(value) for name, value in self.raw_headers)
        if size > bytes_max:
            raise Refusal(431, f"the headers have more than {bytes_max} bytes", "headers_too_large")

    @property
    def content_length(self) -> int | None:
        """Bytes of the body, if the client says so; 0 without a body."""
        length = self.headers.get("content-length", "")
        if length.isdecimal():
            return int(length)
        return None if "transfer-encoding" in self.headers else 0

    @property
    def body_is_whole(self) -> bool:
        """Whether all of the body was read."""
        return self._whole.is_set()

    async def next_of_body(self) -> bytes:
        """The next piece of the body, which may be empty. Has no deadline. Raises ClientGone."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        if not message.get("more_body", False):
            self._whole.set()
        piece: bytes = message.get("body", b"")
        return piece

    async def gone(self) -> None:
        """Returns when the client has left. This cannot be noticed before the body was read."""
        await self._whole.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def start(self, status: int, headers: Headers) -> None:
        """Begins the answer; X-Request-Id is added."""
        self.status = status
        headers = [*headers, (b"x-request-id", self.request_id.encode())]
        if not self.body_is_whole:  # the rest of the body is not read
            headers.append((b"connection", b"close"))
        await self._tell({"type": "http.response.start", "status": status, "headers": headers})

    async def piece(self, data: bytes, more: bool = True) -> None:
        """Sends a piece of the answer; the last has more = False. Raises ClientGone if the client does not take it."""
        self.sent_bytes += len(data)
        await self._tell({"type": "http.response.body", "body": data, "more_body": more})

    async def refuse(self, refusal: Refusal) -> None:
        """Answers with an error object, unless an answer has begun."""
        if self.status:
            return
        body = refusal.body
        headers = [_JSON, (b"content-length", str(len(body)).encode())]
        if refusal.status == 401:
            headers.append(CHALLENGE)
        if refusal.retry_after_s is not None:
            headers.append((b"retry-after", str(refusal.retry_after_s).encode()))
        await self.start(refusal.status, headers)
        await self.piece(body if self.method != "HEAD" else b"", more=False)

    async def _tell(self, message: dict[str, Any]) -> None:
        try:
            with anyio.fail_after(self._stall_timeout_s):
                await self._send(message)
        except (TimeoutError, OSError) as error:
            raise ClientGone from error
