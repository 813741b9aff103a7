"""A scheduler's answer: which requests move where, and where new ones begin."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TypeAlias

__all__ = ["Move", "Place", "Plan", "RequestId"]

RequestId: TypeAlias = Hashable


@dataclass(frozen=True, slots=True)
class Move:
    """One item goes from one GPU to another: a request, or a group of small ones.

    Attributes:
        requests: Those that move; more than one only where all are at most C/8 and their total at most C/4.
        source: The GPU that they leave.
        destination: The GPU that they go on running on.
        tokens: KV cache that moves, before the growth that caused the move.
    """

    requests: tuple[RequestId, ...]
    source: int
    destination: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Place:
    """A new request begins on a GPU."""

    request: RequestId
    gpu: int
    tokens: int


@dataclass(frozen=True)
class Plan:
    """What one operation, or one batch of them, asks the instances to do.

    Done in this order, no GPU ever holds more than C: GPUs in `activated` start; requests that departed are gone; the
    moves are made one after the other, each with room at its destination when those before it are done; new requests
    begin; the reported growth is written; GPUs in `terminated` stop.

    Attributes:
        moves: In order.
        placed: New requests.
        activated: GPUs that run from now on.
        terminated: GPUs that are empty or were lost.
        redispatched: Requests that are stopped and prefilled again elsewhere, by schedulers that do not migrate.
    """

    moves: list[Move] = field(default_factory=list)
    placed: list[Place] = field(default_factory=list)
    activated: tuple[int, ...] = ()
    terminated: tuple[int, ...] = ()
    redispatched: list[Move] = field(default_factory=list)

    @property
    def item_moves(self) -> int:
        """Moves of items: a group counts once (Theorem 3 of the paper counts these)."""
        return len(self.moves)

    @property
    def request_moves(self) -> int:
        """Moves of requests: each member of a group counts."""
        return sum(len(move.requests) for move in self.moves)

    @property
    def tokens_moved(self) -> int:
        """KV cache that moves, in tokens."""
        return sum(move.tokens for move in self.moves)
