"""What rebalancing asks of an engine, besides what migrations ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["RebalancedEngine"]


class RebalancedEngine(Protocol):
    """An engine whose requests are moved by plans. Calls come from one thread of `Rebalancer`; they should be quick."""

    def running(self) -> Sequence[tuple[str, int]]:
        """Its requests, oldest first, each with the tokens that it takes room for; also those that are stopped."""

    def waiting(self) -> Sequence[tuple[str, int]]:
        """New requests without a place, oldest first, each with the tokens that it needs room for at first."""

    def place(self, request: str, to: str) -> None:
        """A new request that waits here begins at the member `to`, which may be this one: it waits here no more.

        If it does not get there, for want of room or because the member is gone, it is to wait again, here or at
        another instance.
        """
