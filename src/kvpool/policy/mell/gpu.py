"""One GPU of a fleet, and its properties."""

from __future__ import annotations

from collections.abc import Iterator

from kvpool.policy.mell.classes import Class
from kvpool.policy.mell.plan import RequestId

__all__ = ["FULL", "NO_KEYS", "TEES_COMBINED", "TEES_COMPLETE", "TEES_OPEN", "Gpu"]

# How many S or M make an S-GPU or M-GPU complete: properties 2 and 1 of Theorem 1.
FULL = {Class.S: 3, Class.M: 2}

# How many T, groups included, a GPU takes beside S and M, so that they can make room without many moves (Theorem 3).
TEES_OPEN = 2
TEES_COMPLETE = {Class.S: 1, Class.M: 2}
TEES_COMBINED = 1  # beside an L and an S or M there is less than C/4

# Of a GPU that stands in none of the ordered sets.
NO_KEYS: tuple[int | None, ...] = (None,) * 5


class Gpu:
    """One GPU: its requests by class, with their sizes. Changed by `Fleet` alone.

    Attributes:
        number: Its id.
        used: Tokens that its requests have.
        large: Its L, if it has one.
        mids: Its S or M.
        tees: Its T.
        small: Its requests of C/8 and less.
        small_total: Their tokens.
        held: T must not come here now: an operation under way will change what fits.
        keys: Its key in each ordered set of the fleet.
        listed: Its S and M that are in `Fleet.fillers`.
        partial: Its role in `Fleet.partial`.
    """

    __slots__ = (
        "held",
        "keys",
        "large",
        "listed",
        "mids",
        "number",
        "partial",
        "small",
        "small_total",
        "tees",
        "used",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.used = 0
        self.large: dict[RequestId, int] = {}
        self.mids: dict[RequestId, int] = {}
        self.tees: dict[RequestId, int] = {}
        self.small: dict[RequestId, int] = {}
        self.small_total = 0
        self.held = False
        self.keys = NO_KEYS
        self.listed: dict[RequestId, int] = {}
        self.partial: Class | None = None

    def requests(self) -> Iterator[tuple[RequestId, int]]:
        """All requests with their sizes, largest class first."""
        for kind in (self.large, self.mids, self.tees, self.small):
            yield from kind.items()

    def __len__(self) -> int:
        return len(self.large) + len(self.mids) + len(self.tees) + len(self.small)
