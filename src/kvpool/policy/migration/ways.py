"""How one request goes, by KV or by tokens (MELL, section V), and how fast its blocks may be fetched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Literal, NamedTuple

from kvpool.errors import ArgumentError
from kvpool.policy.fields import seconds_of
from kvpool.policy.mell.measured import BoundaryProfile

__all__ = ["Pace", "WayChoice", "WayCosts"]


class WayChoice(NamedTuple):
    """What each way is expected to take.

    Attributes:
        way: The one that takes less.
        kv_s: Seconds to fetch what is not cached.
        tokens_s: Seconds to prefill it beside the batch; infinite where a batch of that size leaves no room.
    """

    way: Literal["kv", "tokens"]
    kv_s: float
    tokens_s: float


@dataclass(frozen=True)
class WayCosts:
    """The measured costs at a destination.

    Attributes:
        profile: Links and iterations, as `kvpool.control.profile_boundaries` measured them here.
        links: The name by which the link from each peer was measured.
        link: That of peers which `links` does not name; None: they have no link, and their requests go by tokens.
        share: Of a link's bandwidth, for migration.
        slowdown: How much longer iterations may take, as a part: 0.1 for 10 %.
    """

    profile: BoundaryProfile
    links: Mapping[str, str] = field(default_factory=dict)
    link: str | None = None
    share: float = 0.5
    slowdown: float = 0.1

    def __post_init__(self) -> None:
        """Raises ArgumentError for a link that was not measured, or a number out of range."""
        if not 0 < self.share <= 1 or not self.slowdown >= 0:
            raise ArgumentError(
                f"a share of {self.share}, above 0 and at most 1; a slowdown of {self.slowdown}, from 0"
            )
        for name in {*self.links.values(), *([] if self.link is None else [self.link])}:
            self.profile.link(name)

    def choose(self, peer: str, tokens: int, batch: int) -> WayChoice:
        """How a request goes of which so many tokens are not cached here, to a batch of this size.

        A batch between two measured ones counts as the worse of the two.
        """
        name = self.links.get(peer, self.link)
        kv_s = inf
        if name is not None:
            link = self.profile.link(name)
            kv_s = link.latency_s + tokens * self.profile.model.kv_bytes_per_token / (self.share * link.bytes_per_s)
        a_second = self.profile.compute(1.0, self.slowdown).boundary(batch)
        tokens_s = tokens / a_second if a_second else inf
        return WayChoice("kv" if kv_s <= tokens_s else "tokens", kv_s, tokens_s)


class Pace:
    """Spreads bytes over time: a budget of bytes a second, of which nothing is saved up. Not thread-safe.

    Args:
        bytes_per_s: The budget; None: no bound.
    """

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = None if bytes_per_s is None else seconds_of(bytes_per_s, "the bytes of a second")
        self._free_at = -inf

    def wait_s(self, n_bytes: int, now: float) -> float:
        """Takes so many bytes of the budget; how long to wait before they are moved."""
        if self._bytes_per_s is None:
            return 0.0
        begin = max(now, self._free_at)
        self._free_at = begin + n_bytes / self._bytes_per_s
        return begin - now
