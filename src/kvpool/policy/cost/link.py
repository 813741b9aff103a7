"""The time to move bytes: between instances (eq. 2), between the ranks of an instance, and out of DRAM."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.errors import ArgumentError

__all__ = ["KVTransfer", "Link"]


@dataclass(frozen=True)
class Link:
    """A way for bytes.

    Attributes:
        bytes_per_s: Bandwidth.
        call_s: Cost of each call that sends. The paper's eq. 2 leaves it out; its §5.2 shows that it dominates for
            small pieces.
        latency_s: Once for each transfer.
    """

    bytes_per_s: float
    call_s: float = 0.0
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0 or self.call_s < 0 or self.latency_s < 0:
            raise ArgumentError(f"a link has a bandwidth above 0 and no negative times: {self}")

    def time_s(self, n_bytes: float, calls: float = 1) -> float:
        """Seconds for these bytes in this many calls."""
        return self.latency_s + calls * self.call_s + n_bytes / self.bytes_per_s

    def all_reduce_s(self, n_bytes: float, ranks: int) -> float:
        """Seconds of a ring all-reduce: 2 (ranks - 1) steps of 1 / ranks of the bytes each."""
        if ranks == 1:
            return 0.0
        steps = 2 * (ranks - 1)
        return steps * self.time_s(n_bytes / ranks)


@dataclass(frozen=True)
class KVTransfer:
    """The time to move the KV of a prompt's tokens: the left side of eq. 2.

    Attributes:
        link: Between the two instances.
        bytes_per_token: K and V of a token, all layers (`ModelShape.kv_bytes_per_token`).
        block_tokens: Tokens a block.
        calls_per_block: Network calls for a block: 1 by_request_agg, 2 * layers by_layer and by_request (§5.2). Below 1
            where neighbouring blocks go in one call.
    """

    link: Link
    bytes_per_token: int
    block_tokens: int = 16
    calls_per_block: float = 1.0

    def __post_init__(self) -> None:
        if self.bytes_per_token < 1 or self.block_tokens < 1 or self.calls_per_block < 0:
            raise ArgumentError(f"KV has at least a byte a token and a token a block: {self}")

    def time_s(self, tokens: int) -> float:
        """Seconds for the KV of this many tokens; 0 for none."""
        if tokens <= 0:
            return 0.0
        blocks = -(-tokens // self.block_tokens)
        return self.link.time_s(tokens * self.bytes_per_token, max(1.0, blocks * self.calls_per_block))
