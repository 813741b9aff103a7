"""The Cache of transformers whose content comes from a pool, and goes back to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy.typing as npt
from transformers import DynamicCache

if TYPE_CHECKING:
    from kvpool.engines.transformers.store import PromptStore

__all__ = ["KvpoolCache"]


class KvpoolCache(DynamicCache):  # type: ignore[misc,unused-ignore]
    """A DynamicCache that `PromptStore.load` has filled with what the pool has of a prompt.

    Pass it as ``past_key_values``, to a model or to ``generate``. It is a copy: what becomes of the pool's blocks does
    not change it. Not thread-safe, as any Cache.

    Attributes:
        loaded_tokens: So many tokens of the prompt need not be computed.
        namespace: In which they were found, and where `save` puts them.
    """

    def __init__(self, store: PromptStore, config: Any, namespace: str) -> None:
        """Empty. Use `PromptStore.load`."""
        super().__init__(config=config)
        self._store = store
        self.namespace = namespace
        self.loaded_tokens = 0

    def save(self, tokens: npt.ArrayLike, *, row: int = 0) -> int:
        """Caches what this has of a prompt in the pool it came from. See `PromptStore.save`."""
        return self._store.save(tokens, self, namespace=self.namespace, row=row)
