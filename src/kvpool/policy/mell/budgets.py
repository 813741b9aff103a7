"""What is left of the boundaries of one epoch while moves use them, one after the other."""

from __future__ import annotations

from collections.abc import Mapping

from kvpool.policy.mell.boundaries import Boundaries, Link

__all__ = ["Budgets"]


class Budgets:
    """Boundaries of an epoch, and what is used of them. Nothing is ever used that is not there.

    Attributes:
        link_use: Tokens on each link, with what each transfer takes beside its KV cache.
        compute_use: Tokens that each GPU prefills.
    """

    def __init__(self, boundaries: Boundaries, batches: Mapping[int, int]) -> None:
        """An epoch of which nothing is used.

        Args:
            boundaries: What migration may use.
            batches: Requests that run on each GPU; 0 where it is not named.
        """
        self._boundaries = boundaries
        self._batches = batches
        self.link_use: dict[Link, int] = {}
        self.compute_use: dict[int, int] = {}

    def kv_left(self, source: int, destination: int, whole: bool = False) -> float:
        """KV cache, in tokens, that one more transfer may carry; of a `whole` epoch, were nothing used of it.

        At most 0 where there is nothing left; infinite where no link is passed.
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
        """The part that stays free of the narrowest link after a transfer; negative where it does not fit."""
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
        """Tokens that a GPU may still prefill; of a `whole` epoch, had it prefilled nothing."""
        limit = self._boundaries.compute_tokens(gpu, self._batches.get(gpu, 0))
        return limit if whole else limit - self.compute_use.get(gpu, 0)

    def compute_share(self, gpu: int, tokens: int) -> float:
        """The part that stays free of a GPU's boundary after a prefill; negative where it does not fit."""
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
