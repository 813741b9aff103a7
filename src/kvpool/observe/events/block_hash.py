"""Names of cached blocks that are the same in every process, on every machine, in every run.

    root            sha256("kvpool block hash 1" 0x00 namespace in UTF-8)
    first block     sha256(root, its tokens as int32, little-endian)
    next block      sha256(digest of the block before it, its tokens)

So a name also identifies everything before the block, and two namespaces never share one. Python's `hash()` is not
used, because it differs between processes.
"""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["BlockHasher", "short"]

_VERSION: Final = b"kvpool block hash 1\0"


def short(digest: bytes) -> int:
    """The first 64 bits of a digest, as the unsigned number that routers take for a block's hash."""
    return int.from_bytes(digest[:8], "big")


class BlockHasher:
    """Digests of the blocks of prompts.

    It remembers the last prompt and does not hash a common prefix of the next prompt again, so the blocks of one
    prompt, evicted one by one, cost one hash each. Not thread-safe.

    Args:
        block_tokens: Tokens a block.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._namespace = ""
        self._tokens = np.empty(0, np.int32)
        self._digests: list[bytes] = []

    def chain(self, tokens: npt.NDArray[np.int32], namespace: str = "") -> list[bytes]:
        """The digest of every whole block of a prompt, 32 bytes each.

        Args:
            tokens: int32, from the prompt's start.
            namespace: Of the prompt.
        """
        whole = len(tokens) // self.block_tokens
        known = min(self._known_blocks(tokens, namespace), whole)
        digests = self._digests[:known]
        parent = digests[-1] if digests else hashlib.sha256(_VERSION + namespace.encode("utf-8")).digest()
        width = 4 * self.block_tokens
        content = tokens[known * self.block_tokens : whole * self.block_tokens].astype("<i4").tobytes()
        for start in range(0, len(content), width):
            parent = hashlib.sha256(parent + content[start : start + width]).digest()
            digests.append(parent)
        if whole >= len(self._digests) or known < whole:  # a mere beginning of what is known is no news
            self._namespace, self._tokens, self._digests = namespace, tokens, digests
        return digests

    def _known_blocks(self, tokens: npt.NDArray[np.int32], namespace: str) -> int:
        if namespace != self._namespace:
            return 0
        common = min(len(tokens), len(self._tokens))
        differ = tokens[:common] != self._tokens[:common]
        agreeing = int(differ.argmax()) if differ.any() else common
        return agreeing // self.block_tokens
