"""Many requests of one kind in one call: `PromptIndex.batch`."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool import _core
from kvpool.types import AddressVector, TokenVector

__all__ = ["IndexBatch"]


class IndexBatch:
    """The batch forms of `PromptIndex.match` and `PromptIndex.insert`. Made by `PromptIndex.batch`."""

    __slots__ = ("_index",)

    def __init__(self, index: _core.PromptIndex) -> None:
        """Use `PromptIndex.batch`."""
        self._index = index

    def match(self, prompts: Sequence[TokenVector], namespace: str = "") -> list[_core.Match]:
        """`PromptIndex.match` for many prompts of one namespace. All prompts are read before the first is matched.

        Args:
            prompts: A list of token vectors.
            namespace: Of all of them.

        Returns:
            A list of Match, in the same order.
        """
        return self._index._match_batch(prompts, namespace)

    def insert(self, prompts: Sequence[tuple[TokenVector, AddressVector]], namespace: str = "") -> list[_core.Inserted]:
        """`PromptIndex.insert` for many prompts of one namespace: all of them, or none.

        Args:
            prompts: A list of (tokens, values).
            namespace: Of all of them.

        Returns:
            A list of Inserted, in the same order.
        """
        return self._index._insert_batch(prompts, namespace)
