"""The remaining boundaries of one epoch, while moves use them one after another."""

from __future__ import annotations

from collections.abc import Mapping

from kvpool.policy.mell.boundaries import Boundaries, Link

__all__ = ["Budgets"]


class Budgets:
    """The boundaries of an epoch, and their use, which never exceeds them.

    Attributes:
        link_use: Tokens on each link, including the cost of each transfer.
        compute_use: Tokens that each GPU prefills.
    """

    def __init__(self, boundaries: Boundaries, batches: Mapping[int, int]) -> None:
        """An unused epoch.

        Args:
            boundaries: The capacity for migration.
            batches: Requests that run on each GPU; 0 for a GPU that is not named.
        """
        self._boundaries = boundaries
        self._batches = batches
        self.link_use: dict[Link, int] = {}
        self.compute_use: dict[int, int] = {}

    def kv_left(self, source: int, destination: int, whole: bool = False) -> float:
        """KV cache, in tokens, that one more transfer may carry; `whole`: in an unused epoch.

        At most 0 if nothing is left; infinite if the transfer passes no link.
        """
        between = self._boundaries
        return min(
            (
                between.link_tokens.get(link, 0)
                - between.link_call_tokens.get(link, 0)
                - (0 if whole else self.link_use.get(link, 0))
                for link in between.links(source, destination)
            ),
            default=float("inf"),
        )

    def kv_share(self, source: int, destination: int, tokens: int) -> float:
        """The free part of the narrowest link after a transfer; negative if it does not fit."""
        between = self._boundaries
        return min(
            (
                _share(
                    between.link_tokens.get(link, 0),
                    self.link_use.get(link, 0) + tokens + between.link_call_tokens.get(link, 0),
                )
                for link in between.links(source, destination)
            ),
            default=1.0,
        )

    def compute_left(self, gpu: int, whole: bool = False) -> int:
        """Tokens that a GPU may still prefill; `whole`: in an unused epoch."""
        limit = self._boundaries.compute_tokens(gpu, self._batches.get(gpu, 0))
        return limit if whole else limit - self.compute_use.get(gpu, 0)

    def compute_share(self, gpu: int, tokens: int) -> float:
        """The free part of a GPU's boundary after a prefill; negative if it does not fit."""
        limit = self._boundaries.compute_tokens(gpu, self._batches.get(gpu, 0))
        return _share(limit, self.compute_use.get(gpu, 0) + tokens)

    def use_kv(self, source: int, destination: int, tokens: int) -> None:
        """A transfer. REQUIRES: it fits."""
        for link in dict.fromkeys(self._boundaries.links(source, destination)):
            taken = tokens + self._boundaries.link_call_tokens.get(link, 0)
            self.link_use[link] = self.link_use.get(link, 0) + taken

    def use_compute(self, gpu: int, tokens: int) -> None:
        """A prefill. REQUIRES: it fits."""
        self.compute_use[gpu] = self.compute_use.get(gpu, 0) + tokens


def _share(limit: int, used: int) -> float:
    left = limit - used
    return left / limit if limit > 0 else float(left)
