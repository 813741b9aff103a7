"""The capacity for migration in one epoch (§V): the boundaries of links and of computation."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kvpool.errors import ArgumentError

__all__ = ["Boundaries", "ComputeProfile", "Link"]

Link: TypeAlias = Hashable


@dataclass(frozen=True)
class ComputeProfile:
    """How many tokens an instance can prefill besides its batch in one epoch, measured for some batch sizes.

    Attributes:
        tokens: By batch size. A size between two measured ones gets the smaller figure of the two.
    """

    tokens: Mapping[int, int]

    def __post_init__(self) -> None:
        if not self.tokens or min(self.tokens) < 0 or min(self.tokens.values()) < 0:
            raise ArgumentError(
                f"a profile of the batch sizes {sorted(self.tokens)}: one or more are needed, none negative"
            )

    def boundary(self, batch: int) -> int:
        """Tokens for a batch of this size; 0 beyond the largest that was measured."""
        above = min((size for size in self.tokens if size >= batch), default=None)
        if above is None:
            return 0
        below = max((size for size in self.tokens if size <= batch), default=above)
        return min(self.tokens[below], self.tokens[above])


@dataclass(frozen=True)
class Boundaries:
    """The capacity for migration in one epoch.

    Attributes:
        links: The names of all links that KV cache from one GPU to another passes.
        link_tokens: KV cache, in tokens, that each link carries for migration. A link that is not named carries none.
        compute: The profile of each GPU's instance; an instance without a profile takes no tokens.
        link_call_tokens: The cost of each transfer on a link besides its KV cache, in tokens: the link's latency.
    """

    links: Callable[[int, int], Sequence[Link]]
    link_tokens: Mapping[Link, int]
    compute: Mapping[int, ComputeProfile]
    link_call_tokens: Mapping[Link, int] = field(default_factory=dict)

    def compute_tokens(self, gpu: int, batch: int) -> int:
        """Tokens that a GPU may prefill besides a batch of this size."""
        profile = self.compute.get(gpu)
        return 0 if profile is None else profile.boundary(batch)
