"""Addresses that peers cannot call are refused before a member listens there."""

from __future__ import annotations

import pytest

import kvpool
from kvpool.cluster.listen_addresses import check_can_be_called


@pytest.mark.parametrize(
    "host", ["*", "0", "0.0", "0x0", "00.0.0.0", "0.0.0.0", "[::]", "[0:0::0]", "[::ffff:0.0.0.0]", "[::ffff:0:0]"]
)
def test_a_wildcard_is_refused_in_every_form(host: str) -> None:
    with pytest.raises(kvpool.ArgumentError, match="wildcard"):
        check_can_be_called(f"tcp:{host}:5")


@pytest.mark.parametrize(
    "address",
    [
        "tcp:10.0.0.1:5",
        "tcp:1:5",
        "tcp:host0:5",
        "tcp:[::1]:5",
        "tcp:[::ffff:10.0.0.1]:5",
        "tcp:[fe80::1%lo]:5",
        "unix:/0",
    ],
)
def test_an_address_of_one_interface_is_not(address: str) -> None:
    check_can_be_called(address)
