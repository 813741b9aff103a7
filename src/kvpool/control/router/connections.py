"""Limits the number of client connections, and the time that one may take to send its request.

The HTTP server does not limit a silent connection, or one that sends its headers byte by byte. Here it has
`head_timeout_s` for the headers; between two requests the server's timeout applies.

Above the largest number of connections, a client gets 503 with the reason if it sends a request within a second. Above
twice that number it is disconnected at once, so that clients that read nothing do not accumulate.

A request with two lengths for its body (Content-Length and Transfer-Encoding) is refused with 400, and the connection
is
closed: another server or proxy may use the other length, and take a part of the body for the next request (RFC 9112,
6.1).

A closed TLS connection stays until the client has closed its side, too, and counts until then. The client has a second
for that: asyncio would allow half a minute, and before Python 3.11 any time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from kvpool.control.router.errors import error_object

__all__ = ["Connection", "connections"]

_REFUSED_S: Final = 1.0
_READ_BYTES: Final = 64 << 10
_PARTING_S: Final = 1.0  # for the end of TLS, when a connection is closed
_BODY: Final = error_object(503, "too many connections", "overloaded")
_REFUSAL: Final = b"\r\n".join(
    [
        b"HTTP/1.1 503 Service Unavailable",
        b"content-type: application/json",
        b"content-length: %d" % len(_BODY),
        b"retry-after: 1",
        b"connection: close",
        b"",
        _BODY,
    ]
)


class _Transport:
    """A transport that reports its close, because the HTTP server closes it in many places."""

    def __init__(self, transport: asyncio.Transport, on_close: Callable[[], None]) -> None:
        self._transport = transport
        self._on_close = on_close

    def close(self) -> None:
        """As asyncio has it."""
        if not self._transport.is_closing():
            self._transport.close()
            self._on_close()

    def __getattr__(self, name: str) -> Any:
        """Other attributes are the transport's."""
        return getattr(self._transport, name)


class _Framing(h11.Connection):
    """Reads requests, and refuses those with two lengths."""

    def next_event(self) -> Any:
        """As h11 has it."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if b"transfer-encoding" in names and (b"content-length" in names or event.http_version < b"1.1"):
                raise h11.RemoteProtocolError("the end of the body is said in two ways", error_status_hint=400)
        return event


class Connection(H11Protocol):
    """One connection. Belongs to one event loop.

    Args:
        most: Connections that the server may have.
        head_timeout_s: For a request's line and headers.
        on_refused: Called when there are too many.
        options: The server's.
    """

    def __init__(self, *, most: int, head_timeout_s: float, on_refused: Callable[[], None], **options: Any) -> None:
        super().__init__(**options)
        head_bytes_max = self.config.h11_max_incomplete_event_size
        self.conn = _Framing(h11.SERVER, *([] if head_bytes_max is None else [head_bytes_max]))
        self._on_refused = on_refused
        self._most = most
        self._head_timeout_s = head_timeout_s
        self._refused = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """As asyncio has it."""
        if hasattr(transport, "max_size"):  # asyncio reads 256 KiB at once otherwise, and of all that send at once
            transport.max_size = _READ_BYTES
        super().connection_made(cast("asyncio.Transport", _Transport(transport, self._part)))
        self._refused = len(self.connections) > self._most
        if self._refused:
            self._on_refused()
        if len(self.connections) > 2 * self._most:
            transport.abort()
            return
        self._give(_REFUSED_S if self._refused else self._head_timeout_s)

    def data_received(self, data: bytes) -> None:
        """As asyncio has it."""
        if self.transport.is_closing():
            return  # TLS has its end still before it
        if self._refused:
            self.transport.write(_REFUSAL)
            self.transport.close()
            return
        super().data_received(data)
        if self.transport.is_closing():
            return
        cycle = cast("RequestResponseCycle | None", self.cycle)  # None before the first request
        if cycle is not None and not cycle.response_complete:  # the headers are there
            self._take()
        elif self._timer is None:
            self._give(self._head_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """As asyncio has it."""
        super().connection_lost(exc)
        self._take()

    def _part(self) -> None:
        self._take()
        if self.scheme == "https":
            self._give(_PARTING_S)

    def _give(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self._late)

    def _take(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        self.transport.abort()  # to close it would wait for the end of TLS


def connections(most: int, head_timeout_s: float, on_refused: Callable[[], None]) -> Callable[..., asyncio.Protocol]:
    """A factory of connections, for a server's configuration."""

    def made(**options: Any) -> asyncio.Protocol:
        return Connection(most=most, head_timeout_s=head_timeout_s, on_refused=on_refused, **options)

    return made
