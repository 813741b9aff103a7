"""Messages between pools that migrate: `private` bytes of a prompt that both have cached, so that no block is sent."""

from __future__ import annotations

import logging
from typing import Final

import numpy as np

from kvpool._core import Transfer
from kvpool.errors import Error, StateError
from kvpool.policy import migration as policy
from kvpool.pool import Pool
from kvpool.types import DRAM, HBM

__all__ = ["NAMESPACE", "Mailbox"]

_log = logging.getLogger("kvpool.migration")

NAMESPACE: Final = "kvpool/migration"


class Mailbox:
    """One block of a pool, pinned, that messages from and to it go with. Thread-safe.

    Raises:
        OutOfBlocks: The pool has no block for it.
        StateError: All of its blocks are an engine's.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        size = pool.kv_layout.block_tokens
        self._tokens = np.arange(1, size + 1, dtype=np.int32)
        stats = pool.stats()
        try:
            medium = HBM if stats.hbm.capacity else DRAM
            addrs = pool.alloc(1, medium)
        except StateError:  # the engine allocates there
            if not stats.dram.capacity:
                raise
            addrs = pool.alloc(1, DRAM)
        try:
            self._held = pool.insert(self._tokens, addrs, namespace=NAMESPACE, free_duplicates=True)
        except BaseException:
            pool.free(addrs)
            raise

    def begin(self, peer: str, message: bytes, timeout: float) -> Transfer:
        """Begins to send a message. Raises what `Pool.transfer_with_insert` does."""
        return self._pool.transfer_with_insert(
            peer,
            self._tokens,
            self._held.addrs,
            namespace=NAMESPACE,
            private=message,
            priority="decode",
            timeout=timeout,
        )

    def answer(self, peer: str, said: policy.SourceSays | policy.DestinationSays, timeout: float) -> None:
        """Says something about what is not under way. The other side asks again if this does not reach it."""
        try:
            self.begin(peer, policy.encode(said), timeout)
        except Error as error:
            _log.info("%s was not answered: %s", peer, error, extra={"peer": peer})

    def close(self) -> None:
        """Unpins the block. Idempotent."""
        self._held.close()
