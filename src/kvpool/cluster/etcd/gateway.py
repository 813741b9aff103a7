"""A thin client of etcd's gRPC gateway: JSON over HTTP, from the standard library alone (ADR 0012).

The lease renewer imports this without the rest of kvpool, so that it starts fast and stays small.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["AUTHENTICATE_S", "Denied", "Gateway", "NoAnswer", "Options", "Stream", "after", "decode", "encode"]

AUTHENTICATE_S: Final = 5.0  # for etcd to check a password, where the caller can wait
_BODY_BYTES_MAX: Final = 256 << 20  # 4,000 members with records of 64 KiB
_LINE_BYTES_MAX: Final = 64 << 20
_BAD_ARGUMENT: Final = 3  # this and those below are codes of gRPC
_NOT_FOUND: Final = 5
_PERMISSION_DENIED: Final = 7
_AUTH_IS_OFF: Final = 9
_UNAUTHENTICATED: Final = 16
_DENYING: Final = {_BAD_ARGUMENT, _PERMISSION_DENIED, _UNAUTHENTICATED}


class NoAnswer(Exception):
    """No endpoint answered in time, or all reported a temporary failure.

    Attributes:
        is_missing: The last endpoint says that what the request names does not exist.
    """

    def __init__(self, why: str, *, is_missing: bool = False) -> None:
        super().__init__(why)
        self.is_missing = is_missing


class Denied(Exception):
    """etcd refuses access: a wrong password, a missing permission, or an untrusted certificate."""


@dataclass(frozen=True)
class Options:
    """How to reach etcd. The lease renewer receives it as JSON."""

    hosts: tuple[tuple[str, int], ...]
    tls: bool = False
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    user: str | None = None
    password: str | None = None


def encode(text: str | bytes) -> str:
    """Encodes a key or a value for etcd's JSON."""
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


def decode(text: str) -> bytes:
    """Decodes a key or a value of etcd's JSON."""
    return base64.b64decode(text)


def after(prefix: str) -> str:
    """The encoded end of the range of all keys with a prefix."""
    content = prefix.encode()
    return encode(content[:-1] + bytes([content[-1] + 1]))


class Gateway:
    """Calls etcd: first the endpoint that answered last, then the others. Any thread; one call at a time."""

    def __init__(self, options: Options) -> None:
        """Connects with the first call.

        Raises:
            OSError: A TLS file cannot be read, or is invalid.
        """
        self._options = options
        self._context = _context(options) if options.tls else None
        self._lock = threading.Lock()
        self._at = 0
        self._connection: http.client.HTTPConnection | None = None
        self._token = ""

    @property
    def endpoint(self) -> int:
        """The index of the endpoint that answered last."""
        return self._at

    @property
    def address(self) -> str:
        """The address of that endpoint."""
        host, port = self._options.hosts[self._at]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def call(
        self,
        path: str,
        body: dict[str, Any],
        timeout_s: float,
        endpoint: int | None = None,
        *,
        authenticate_s: float = 0.0,
    ) -> dict[str, Any]:
        """Sends a request and returns the answer.

        Args:
            path: The path after "/v3/".
            body: The request.
            timeout_s: Seconds for all endpoints together.
            endpoint: Ask only this one.
            authenticate_s: Seconds for an endpoint to check the password, if that is more than the remaining time. The
                check is slow by design (bcrypt), and slower when etcd has just come back and all clients ask at once.
                Giving it up saves etcd nothing, and the next try starts over.

        Raises:
            NoAnswer: No endpoint answered in time.
            Denied: etcd refuses access.
        """
        until = time.monotonic() + timeout_s
        tries = 1 if endpoint is not None else len(self._options.hosts)
        with self._lock:
            why, is_missing = "no time left", False
            for left in range(tries, 0, -1):
                if endpoint is not None and endpoint != self._at:
                    self._move_to(endpoint)
                share_s = (until - time.monotonic()) / left
                if share_s <= 0:
                    break
                try:
                    return self._ask_authenticated(path, body, time.monotonic() + share_s, authenticate_s)
                except NoAnswer as error:
                    why, is_missing = f"{self.address}: {error}", error.is_missing
                    if endpoint is None:
                        self._move_to(self._at + 1)
            raise NoAnswer(why, is_missing=is_missing)

    def stream(self, path: str, body: dict[str, Any], timeout_s: float) -> Stream:
        """Sends a request to the endpoint that answered last, and returns its endless stream of answers.

        Raises:
            NoAnswer: It does not answer in time.
            Denied: etcd refuses access.
        """
        with self._lock:
            self._authenticate(time.monotonic() + timeout_s)
            connection = self._connect(timeout_s)
            headers = self._headers()
        try:
            connection.request("POST", "/v3/" + path, json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise _failure(response.status, response.read(1 << 16))
            return Stream(connection, response)  # which closes the connection
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise NoAnswer(str(error) or type(error).__name__) from None
        except _Failed as error:
            connection.close()
            raise error.public() from None

    def close(self) -> None:
        """Closes the connection. The next call opens one again."""
        with self._lock:
            self._drop()

    def _ask_authenticated(
        self, path: str, body: dict[str, Any], until: float, authenticate_s: float
    ) -> dict[str, Any]:
        """Authenticates only if etcd requires it: renewing a lease needs no password, and must not wait for that."""
        try:
            try:
                return self._ask(path, body, until)
            except _Failed as error:
                if not self._options.user or not error.asks_for_token(bool(self._token)):
                    raise
            self._token = ""  # it has expired, or etcd was restarted
            until = max(until, time.monotonic() + authenticate_s)
            self._authenticate(until)
            return self._ask(path, body, until)
        except _Failed as error:
            raise error.public() from None

    def _authenticate(self, until: float) -> None:
        if self._token or not self._options.user:
            return
        body = {"name": self._options.user, "password": self._options.password}
        try:
            self._token = str(self._ask("auth/authenticate", body, until)["token"])
        except _Failed as error:
            if error.code != _AUTH_IS_OFF:
                raise error.public() from None

    def _ask(self, path: str, body: dict[str, Any], until: float) -> dict[str, Any]:
        """Sends one request on the open connection, or on a new one if etcd has closed it meanwhile."""
        kept = self._connection is not None
        try:
            return self._ask_once(path, body, until)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._drop()
            _raise_if_untrusted(error)
            if not kept or isinstance(error, TimeoutError):
                raise NoAnswer(str(error) or type(error).__name__) from None
        try:
            return self._ask_once(path, body, until)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._drop()
            raise NoAnswer(str(error) or type(error).__name__) from None

    def _ask_once(self, path: str, body: dict[str, Any], until: float) -> dict[str, Any]:
        timeout_s = until - time.monotonic()
        if timeout_s <= 0:
            raise TimeoutError("no answer in time")
        if self._connection is None:
            self._connection = self._connect(timeout_s)
        if self._connection.sock is not None:
            self._connection.sock.settimeout(timeout_s)
        self._connection.request("POST", "/v3/" + path, json.dumps(body), self._headers())
        response = self._connection.getresponse()
        content = response.read(_BODY_BYTES_MAX)
        if response.status != 200:
            raise _failure(response.status, content)
        answer = json.loads(content)
        if not isinstance(answer, dict):
            raise ValueError("the answer is not a JSON object")
        return answer

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        host, port = self._options.hosts[self._at]
        if self._context is None:
            return http.client.HTTPConnection(host, port, timeout=timeout_s)
        return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=self._context)

    def _headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json"} | ({"Authorization": self._token} if self._token else {})

    def _move_to(self, endpoint: int) -> None:
        self._drop()
        self._at = endpoint % len(self._options.hosts)

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class Stream:
    """An endless stream of answers. One thread reads and closes it; any may `stop` it."""

    def __init__(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        """Use `Gateway.stream`."""
        self._connection = connection
        self._response = response
        self._socket = connection.sock
        if self._socket is None:  # the server has already ended the answer
            raise ConnectionError("the stream has ended")
        self._socket.settimeout(None)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Each answer.

        Raises:
            NoAnswer: The connection is lost, or closed by this side.
        """
        while True:
            try:
                line = self._response.readline(_LINE_BYTES_MAX)
                message = json.loads(line) if line.strip() else None
            except (OSError, ValueError, http.client.HTTPException) as error:
                raise NoAnswer(str(error) or type(error).__name__) from None
            if not line:
                raise NoAnswer("the stream has ended")
            if isinstance(message, dict):
                if "error" in message:
                    raise NoAnswer(str(message["error"])[:500])
                yield message.get("result") or {}

    def stop(self) -> None:
        """Makes the reading thread end with NoAnswer. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connection. Idempotent."""
        self._response.close()
        self._connection.close()


class _Failed(Exception):
    """etcd answered with an error."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code

    def asks_for_token(self, has_token: bool) -> bool:
        """Whether a new token may help: this side has no token, or it expired, or users changed or were switched on.

        For the latter two etcd uses the code of a bad argument, and tells them from others by its text alone. The
        requests of this package are right, and one that is not is repeated once, which costs a check of the password.
        """
        return self.code in _DENYING and not (has_token and self.code == _PERMISSION_DENIED)

    def public(self) -> NoAnswer | Denied:
        if self.code in _DENYING:
            return Denied(str(self))
        return NoAnswer(str(self), is_missing=self.code == _NOT_FOUND)


def _failure(status: int, content: bytes) -> _Failed:
    try:
        answer = json.loads(content)
        return _Failed(int(answer.get("code", 0)), f"{answer.get('message') or answer.get('error')}"[:500])
    except (ValueError, TypeError, AttributeError):
        return _Failed(0, f"HTTP status {status}")


def _raise_if_untrusted(error: Exception) -> None:
    if isinstance(error, ssl.SSLCertVerificationError):
        raise Denied(f"etcd's certificate: {error.verify_message}") from None


def _context(options: Options) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=options.tls_ca)
    if options.tls_cert:
        context.load_cert_chain(options.tls_cert, options.tls_key)
    return context
