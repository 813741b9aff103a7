"""Checks of addresses of peers, before anything is opened."""

from __future__ import annotations

from typing import Final

from kvpool import _core
from kvpool.errors import ArgumentError

__all__ = ["check_connect", "check_listen"]

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


def _check_slashes(address: object) -> None:
    if not isinstance(address, str):
        return  # the core says so
    for wrong, right in _SLASHES.items():
        if address.startswith(wrong):
            meant = right + address.removeprefix(wrong)
            raise ArgumentError(f"{address!r} is no address: write {meant}, without slashes")
