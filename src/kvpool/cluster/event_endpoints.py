"""The endpoints of KV events that members name, to which others connect."""

from __future__ import annotations

from re import fullmatch

from kvpool.errors import ArgumentError, ArgumentTypeError

__all__ = ["check_event_endpoint"]


def check_event_endpoint(endpoint: object) -> None:
    """Raises ArgumentError for what ZMQ cannot connect to, such as an address to bind.

    ArgumentTypeError for what is no text.
    """
    if not isinstance(endpoint, str):
        raise ArgumentTypeError(f"an endpoint of KV events must be a str, not {type(endpoint).__name__}")
    found = fullmatch(r"tcp://[^\s*]+:([0-9]{1,5})|ipc://\S+", endpoint)
    if found is None or not 0 < int(found[1] or 1) < 1 << 16:
        raise ArgumentError(
            f"KV events of {endpoint!r}: it must look like tcp://10.0.0.1:5557 or ipc:///path, with an address to "
            "connect to"
        )
