"""Checks of addresses of peers, before anything is opened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvpool import _core
from kvpool.cluster.listen_addresses import check_can_be_called
from kvpool.errors import ArgumentError, ArgumentTypeError

__all__ = ["check_connect", "check_listen", "check_member_listens", "listen_addresses"]

# As URLs have it. After "unix:" a path may begin with two slashes, but a name may not.
_SLASHES: Final = {"tcp://": "tcp:", "unix://@": "unix:@"}


def check_listen(address: str, has_secret: bool) -> None:
    """Raises ArgumentError if nobody can listen there, and ArgumentTypeError if it is no str."""
    _check_slashes(address)
    _core._check_listen_address(address, has_secret)


def check_connect(address: str, has_secret: bool) -> None:
    """Raises ArgumentError if nobody can be reached there, and ArgumentTypeError if it is no str."""
    _check_slashes(address)
    _core._check_connect_address(address, has_secret)


def listen_addresses(listen: object) -> list[str]:
    """The addresses that a member is to listen at: of one, or a sequence of them. They are not checked.

    Raises:
        ArgumentError: The sequence is empty.
        ArgumentTypeError: They are no texts.
    """
    given = [listen] if isinstance(listen, str) else listen
    if not isinstance(given, Sequence) or not all(isinstance(one, str) for one in given):
        raise ArgumentTypeError(f"listen must be an address or a sequence of addresses, not {listen!r}")
    if not given:
        raise ArgumentError("listen is empty: a member needs at least one address")
    return list(given)


def check_member_listens(address: str, has_secret: bool) -> None:
    """Raises ArgumentError if a member cannot listen there, or others cannot connect to the address as given."""
    if address.startswith("tcp:") and not has_secret:
        raise ArgumentError(f"listen: {address} needs a secret: give every member's pool the same setting secret")
    check_listen(address, has_secret)
    check_can_be_called(address)


def _check_slashes(address: object) -> None:
    if not isinstance(address, str):
        return  # the core says so
    for wrong, right in _SLASHES.items():
        if address.startswith(wrong):
            meant = right + address.removeprefix(wrong)
            raise ArgumentError(f"{address!r} is no address: write {meant}, without slashes")
