"""Where a member listens: what others get to call it by."""

from __future__ import annotations

import contextlib
import ipaddress

from kvpool.errors import ArgumentError

__all__ = ["check_can_be_called"]


def check_can_be_called(address: str) -> None:
    """Refuses a wildcard address, because peers get the address as given. It is a valid address.

    Raises:
        ArgumentError: It is a wildcard.
    """
    host = address.removeprefix("tcp:").rpartition(":")[0].strip("[]")
    every = host == "*"
    with contextlib.suppress(ValueError):  # a name
        every = every or ipaddress.ip_address(host).is_unspecified
    if every:
        raise ArgumentError(f"listen: {address} is a wildcard: give the address or host name that others connect to")
