"""Many requests of one kind in one call: `Pool.batch`."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool._core import Inserted, Match, Pool, Transfer
from kvpool.types import AddressVector, TokenVector, TransferSpec

__all__ = ["Batch"]


class Batch:
    """The batch forms of `Pool.match`, `Pool.insert` and `Pool.transfer`. `Pool.batch` makes it. Keeps its pool."""

    __slots__ = ("_pool",)

    def __init__(self, pool: Pool) -> None:
        """Use `Pool.batch`."""
        self._pool = pool

    def match(self, prompts: Sequence[TokenVector], namespace: str = "") -> list[Match]:
        """`Pool.match` for many prompts of one namespace. All prompts are read before the first is matched.

        Args:
            prompts: A list of token vectors.
            namespace: Of all of them.

        Returns:
            A list of Match, in the same order.
        """
        return self._pool._match_batch(prompts, namespace)

    def insert(
        self,
        prompts: Sequence[tuple[TokenVector, AddressVector]],
        namespace: str = "",
        free_duplicates: bool = False,
    ) -> list[Inserted]:
        """`Pool.insert` for many prompts of one namespace: all of them, or none.

        Args:
            prompts: A list of (tokens, addresses).
            namespace: Of all of them.
            free_duplicates: As in `Pool.insert`.

        Returns:
            A list of Inserted, in the same order.
        """
        return self._pool._insert_batch(prompts, namespace, free_duplicates)

    def transfer(self, specs: Sequence[TransferSpec]) -> list[Transfer]:
        """Starts many transfers at once, to any peers.

        Args:
            specs: A list of kvpool.TransferSpec.

        Returns:
            A list of Transfer, in the same order.

        Raises:
            As `Pool.transfer`, when an argument of one is wrong; then none was started.
            ArgumentTypeError: One is no TransferSpec.
        """
        return self._pool._transfer_batch(specs)
