"""Error answers for clients: a status, and the error object of OpenAI's API.

They never contain an instance's address or a traceback.
"""

from __future__ import annotations

import json
from typing import Final

__all__ = ["ClientGone", "Refusal", "error_event", "error_object"]

_TYPES: Final = {
    401: "authentication_error",
    503: "overloaded_error",
    502: "upstream_error",
    504: "timeout_error",
    500: "server_error",
}


class Refusal(Exception):
    """The router itself ends a request with an error status.

    Args:
        status: 400, 401, 408, 413, 431, 500, 502, 503 or 504.
        message: For people.
        code: For programs: a stable word.
        retry_after_s: When to retry; None: do not say.
    """

    def __init__(self, status: int, message: str, code: str, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> bytes:
        """The error object as JSON."""
        return error_object(self.status, str(self), self.code)


class ClientGone(Exception):
    """The client closed its connection, so it no longer waits for an answer."""


def error_object(status: int, message: str, code: str) -> bytes:
    """`{"error": {...}}`, as in OpenAI's API."""
    kind = _TYPES.get(status, "invalid_request_error")
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()


def error_event(message: str, code: str) -> bytes:
    """The last event of a broken stream: clients raise an APIError for an event with `error`."""
    return b"data: " + error_object(502, message, code) + b"\n\n"
