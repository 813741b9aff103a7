"""What lending asks of a pool and of a sequence: small, so that tests can stand in for both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvpool.types import HBM, Medium, MediumChoice
from kvpool.waiting.handles import Handle

__all__ = ["Addresses", "LendingPool", "LentSequence", "counts_of"]

Addresses = npt.NDArray[np.uint64]


class LentSequence(Protocol):
    """A `KVSequence`."""

    @property
    def addrs(self) -> Addresses:
        """Where each block lies."""

    @property
    def tokens(self) -> int:
        """How many tokens are written."""

    @property
    def closed(self) -> bool:
        """Whether it has ended."""

    @property
    def _set_backs(self) -> int:
        """How often tokens were taken back."""

    def _switch(self, blocks: list[int], old: Addresses, new: Addresses, copied_at: int, timeout: float | None) -> None:
        """Puts copies in the place of all of these blocks, or of none if one has changed since `copied_at`."""


class LendingPeers(Protocol):
    """`Peers`: how many blocks they may borrow, and what this pool has borrowed."""

    lend_max: int | None

    def __iter__(self) -> Iterator[Any]:
        """The connected peers: `instance`, and `borrowed_blocks`."""


class LendingPool(Protocol):
    """A `Pool` that is a member of a cluster."""

    @property
    def _pieces(self) -> int:
        """In how many pieces a block may lie."""

    @property
    def settings(self) -> Any:
        """Has `timeout_s`."""

    @property
    def kv_layout(self) -> Any:
        """Has `block_tokens`."""

    @property
    def closed(self) -> bool:
        """Whether it has ended."""

    @property
    def peers(self) -> LendingPeers:
        """Its `Peers`."""

    def stats(self) -> Any:
        """Has `hbm` and `dram`: how many blocks are free and lent."""

    def alloc(
        self,
        n: int,
        medium: MediumChoice = ...,
        evict: bool = ...,
        *,
        instance: str | None = None,
        timeout: float | None = None,
    ) -> Addresses:
        """Takes blocks here, or borrows them of a peer."""

    def free(self, addrs: Addresses) -> None:
        """Gives blocks back."""

    def sequence(self, addrs: Addresses, tokens: int) -> Any:
        """A `KVSequence` of these blocks, of which so many tokens are written."""

    def transfer(
        self, peer: str, blocks: Addresses, *, to: Addresses, layerwise: bool = ..., timeout: float | None = None
    ) -> Any:
        """Sends content to blocks that were borrowed: a `Transfer`, or a `TransferStream`."""

    def fetch(self, peer: str | None, blocks: Addresses, *, to: Addresses, timeout: float | None = None) -> Handle:
        """Brings content of borrowed blocks here."""


def counts_of(pool: LendingPool, medium: Medium) -> Any:
    """The capacity of a medium, and how many of its blocks are free, lent and so on: `MediumStats`."""
    stats = pool.stats()
    return stats.hbm if medium == HBM else stats.dram
