"""HTTP to one instance. The only place that knows httpx2: its errors become `UpstreamError` here."""

from __future__ import annotations

import errno
import os
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Sequence
from functools import cache
from typing import Final

import anyio

from kvpool.control.router.body import Body
from kvpool.control.router.settings import InstanceSpec, RouterSettings

if sys.version_info >= (3, 11):
    import httpx2 as httpx
else:  # httpx2, which goes on with it, does not run there
    import httpx

__all__ = ["Answer", "Asker", "Headers", "Prober", "Upstream", "UpstreamError", "trusts_nobody"]

Headers = Sequence[tuple[bytes, bytes]]

# RFC 9110, 7.6.1: what concerns one connection alone. Each side sets the rest itself.
_NOT_PASSED: Final = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer transfer-encoding "
    b"upgrade host content-length expect date server x-kvpool-instance x-request-id".split()
)
_CLOSE_S: Final = 2.0
_LATE_S: Final = 0.5  # by which a timer is late when the machine is overloaded
_ASK_LATE_S: Final = 0.1  # the same, of a question's, whose deadline is short
_REFUSAL_BYTES: Final = 4096


class UpstreamError(Exception):
    """The instance gave no answer, or broke off.

    Args:
        message: Without its address.
        sent: It may have begun to work on the request.
        ours: It is the router that has nothing left to ask it with; of the instance nothing is known.
    """

    def __init__(self, message: str, sent: bool, ours: bool = False) -> None:
        super().__init__(message)
        self.sent = sent
        self.ours = ours


def _out_of_files(error: BaseException | None) -> bool:
    """Whether this process could not open a socket, which lies somewhere in what led to the error."""
    if error is None:
        return False
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return True
    # Of a name with several addresses, a group has the errors of each.
    each: Sequence[BaseException] = getattr(error, "exceptions", ())
    return any(map(_out_of_files, each)) or _out_of_files(error.__cause__ or error.__context__)


def _cause(error: BaseException) -> str:
    """What the system said, which lies somewhere in what led to the error, without addresses; else the error's name."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, ssl.SSLCertVerificationError):
            return f"its certificate is not trusted: {found.verify_message}"
        if isinstance(found, (ssl.SSLError, socket.gaierror)):  # their numbers are not the system's
            return f"{found.strerror or found}"
        if isinstance(found, OSError) and found.errno:
            return os.strerror(found.errno)  # asyncio has put the address into its text
        found = found.__cause__ or found.__context__ or next(iter(getattr(found, "exceptions", ())), None)
    return type(error).__name__


def passed_on(headers: Headers) -> list[tuple[bytes, bytes]]:
    """The headers that go through, names in lower case."""
    named = [(name.lower(), value) for name, value in headers]
    listed = [value for name, value in named if name == b"connection"]
    also = {word.strip().lower() for value in listed for word in value.split(b",")}
    return [(name, value) for name, value in named if name not in _NOT_PASSED and name not in also]


class Answer:
    """An answer whose body is read piece by piece. Close it.

    Attributes:
        status: Of HTTP.
        headers: Those that go through, and Content-Length where the instance named it.
        first: The first piece of the body; empty for an empty body.
    """

    def __init__(self, response: httpx.Response, pieces: AsyncIterator[bytes], first: bytes) -> None:
        self.status = response.status_code
        self.headers = passed_on(response.headers.raw)
        self.first = first
        length = response.headers.get("content-length")
        if length is not None:
            self.headers.append((b"content-length", length.encode()))
        self.is_events = response.headers.get("content-type", "").lower().startswith("text/event-stream")
        self._response = response
        self._pieces = pieces

    async def next(self) -> bytes:
        """The next piece, nothing at the end. Raises UpstreamError when the instance breaks off."""
        try:
            return await anext(self._pieces, b"")
        except httpx.HTTPError as error:
            raise UpstreamError(f"the instance broke off: {type(error).__name__}", sent=True) from error

    async def close(self) -> None:
        """Releases the connection; one that was not read to its end is closed, so the instance notices."""
        with anyio.move_on_after(_CLOSE_S, shield=True):
            await self._response.aclose()


class Upstream:
    """A client of one instance. Belongs to one event loop.

    Args:
        spec: The instance.
        settings: For limits and deadlines.
    """

    def __init__(self, spec: InstanceSpec, settings: RouterSettings) -> None:
        self._base = httpx.URL(spec.url)
        # As many as it may have requests, so a request waits for a connection only while another one is closed.
        # Engines close idle connections after 5 s and more.
        most = settings.in_flight_max
        limits = httpx.Limits(max_connections=most, max_keepalive_connections=min(64, most), keepalive_expiry=2.0)
        self._client = _client(httpx.Timeout(None, connect=settings.connect_timeout_s), limits)

    async def open(self, method: str, path: bytes, headers: Headers, body: Body) -> Answer:
        """Sends a request and waits for the first piece of its answer's body. Has no deadline: cancel it.

        Args:
            method: Of HTTP.
            path: With the query, as it came.
            headers: That go through, and what the router adds.
            body: The client's.

        Raises:
            UpstreamError: No connection, or no answer on it.
            Exception: What reading a streamed body raises.
        """
        url = self._base.copy_with(raw_path=self._base.raw_path.rstrip(b"/") + path)
        if body.length == 0:
            request = httpx.Request(method, url, headers=list(headers))
        else:
            length = [] if body.length is None else [(b"content-length", str(body.length).encode())]
            request = httpx.Request(method, url, headers=[*headers, *length], content=body)
        try:
            response = await self._client.send(request, stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            if _out_of_files(error):
                raise UpstreamError("the router has too many files open", sent=False, ours=True) from error
            raise UpstreamError("the instance cannot be reached", sent=False) from error
        except httpx.HTTPError as error:
            raise UpstreamError(f"the instance gave no answer: {type(error).__name__}", sent=True) from error
        pieces = response.aiter_raw()
        try:
            answer = Answer(response, pieces, b"")
            answer.first = await answer.next()
        except BaseException:
            with anyio.move_on_after(_CLOSE_S, shield=True):
                await response.aclose()
            raise
        return answer

    async def close(self) -> None:
        """Closes all connections."""
        await self._client.aclose()


class Prober:
    """Asks one instance how it is. Belongs to one event loop.

    Args:
        spec: The instance.
        timeout_s: Of a probe.
    """

    def __init__(self, spec: InstanceSpec, timeout_s: float) -> None:
        self._base = httpx.URL(spec.url)
        self._timeout_s = timeout_s
        # A probe checks that the engine accepts connections, so it opens a new one.
        self._client = _client(httpx.Timeout(timeout_s), httpx.Limits(max_connections=2, max_keepalive_connections=0))

    async def probe(self, path: str) -> str | None:
        """Asks the instance how it is: what is wrong, without its address; None when it answers a GET with 2xx in time.

        Raises:
            UpstreamError: Nothing is known of it: the router has no file left to ask it with, or was itself so slow
                that the answer may have come in time.
        """
        url = self._base.copy_with(raw_path=self._base.raw_path.rstrip(b"/") + path.encode())
        began = time.monotonic()
        try:
            with anyio.fail_after(self._timeout_s):
                response = await self._client.get(url)
        except (httpx.HTTPError, TimeoutError) as error:
            if _out_of_files(error):
                raise UpstreamError("the router has too many files open", sent=False, ours=True) from error
            if isinstance(error, (httpx.TimeoutException, TimeoutError)):
                if time.monotonic() - began > self._timeout_s + _LATE_S:
                    raise UpstreamError("the router was too slow to ask", sent=True, ours=True) from error
                return f"no answer within {self._timeout_s:g} s"
            return _cause(error)
        return None if response.is_success else f"it answered with status {response.status_code}"

    async def close(self) -> None:
        """Closes all connections."""
        await self._client.aclose()


class Asker:
    """Asks instances short questions beside the requests. Belongs to one event loop.

    Args:
        timeout_s: Of a question.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        limits = httpx.Limits(max_connections=256, max_keepalive_connections=64, keepalive_expiry=2.0)
        self._client = _client(httpx.Timeout(timeout_s), limits)

    async def get(self, spec: InstanceSpec, path: str, authorization: bytes | None, most: int) -> tuple[int, bytes]:
        """As `post`, by GET."""
        return await self._ask("GET", spec, path, authorization, None, most, 1)

    async def post(
        self, spec: InstanceSpec, path: str, authorization: bytes | None, data: bytes, most: int, times: int = 1
    ) -> tuple[int, bytes]:
        """The status of the answer and its body; of other statuses than 200 nothing if it is longer than 4 KiB.

        Args:
            spec: The instance.
            path: Of the question.
            authorization: The header of that name; None for none.
            data: JSON.
            most: Bytes of the answer.
            times: So many times the timeout.

        Raises:
            UpstreamError: There is no answer in time, or it is too long. `ours`: the router could not ask, or was so
                slow itself that the answer may have come in time.
        """
        return await self._ask("POST", spec, path, authorization, data, most, times)

    async def close(self) -> None:
        """Closes all connections."""
        await self._client.aclose()

    async def _ask(
        self,
        method: str,
        spec: InstanceSpec,
        path: str,
        authorization: bytes | None,
        data: bytes | None,
        most: int,
        times: int,
    ) -> tuple[int, bytes]:
        base = httpx.URL(spec.url)
        url = base.copy_with(raw_path=base.raw_path.rstrip(b"/") + path.encode())
        headers = [(b"accept-encoding", b"identity")]
        if data is not None:
            headers.append((b"content-type", b"application/json"))
        if authorization is not None:
            headers.append((b"authorization", authorization))
        timeout_s = self._timeout_s * times
        began = time.monotonic()
        try:
            with anyio.fail_after(timeout_s):
                async with self._client.stream(
                    method, url, headers=headers, content=data, timeout=timeout_s
                ) as response:
                    got = bytearray()
                    good = response.status_code == 200
                    async for piece in response.aiter_raw():
                        got += piece
                        if len(got) > (most if good else _REFUSAL_BYTES):
                            if not good:
                                return response.status_code, b""
                            raise UpstreamError("its answer is too long", sent=True)
                    return response.status_code, bytes(got)
        except (httpx.TimeoutException, TimeoutError) as error:
            late = time.monotonic() - began > timeout_s + _ASK_LATE_S
            message = f"no answer within {timeout_s:g} s"
            ours = late or isinstance(error, httpx.PoolTimeout)
            raise UpstreamError(message, sent=True, ours=ours) from TimeoutError(str(error))
        except httpx.HTTPError as error:
            # Of a header that HTTP does not allow the client is to blame.
            ours = _out_of_files(error) or isinstance(error, httpx.LocalProtocolError)
            raise UpstreamError(_cause(error), sent=not isinstance(error, httpx.ConnectError), ours=ours) from error


def _client(timeout: httpx.Timeout, limits: httpx.Limits) -> httpx.AsyncClient:
    # Proxies of the environment are for the world outside.
    return httpx.AsyncClient(
        timeout=timeout, limits=limits, verify=_certificates(), trust_env=False, follow_redirects=False
    )


@cache
def _certificates() -> ssl.SSLContext:
    """The machine's; reading them takes milliseconds, and each client would."""
    return httpx.create_ssl_context()


def trusts_nobody() -> bool:
    """Whether the machine's store of certificates is empty, so that no instance of https can be reached.

    Files of a folder are read when they are needed, and are not counted: a folder that is not empty is enough.
    """
    folder = ssl.get_default_verify_paths().capath
    filled = os.path.isdir(folder or "") and bool(os.listdir(folder))
    return not filled and not _certificates().get_ca_certs()
