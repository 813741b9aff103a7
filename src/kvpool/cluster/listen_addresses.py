"""Where a member listens: what others get to call it by."""

from __future__ import annotations

import ipaddress
import socket

from kvpool.errors import ArgumentError

__all__ = ["check_can_be_called"]


def check_can_be_called(address: str) -> None:
    """Refuses a wildcard address, because peers get the address as given. It is a valid address.

    Raises:
        ArgumentError: It is a wildcard.
    """
    host = address.removeprefix("tcp:").rpartition(":")[0].strip("[]")
    if host == "*" or (address.startswith("tcp:") and _is_unspecified(host)):
        raise ArgumentError(f"listen: {address} is a wildcard: give the address or host name that others connect to")


def _is_unspecified(host: str) -> bool:
    """Whether a host is a numeric address for all interfaces, in any form that sockets take: "0" and "0x0" are, too."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):  # a name
        return False
    address = ipaddress.ip_address(str(found[0][4][0]).partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_unspecified
