"""Adaptive request migration (§V): which moves of a plan go as KV cache, which as tokens, and which wait.

A request moves as KV cache, which uses links, or as tokens, which the destination prefills again, using its compute.
Both have boundaries, profiled beforehand, up to which running requests do not suffer. Dividing the moves between the
two means packing them into two kinds of bins; a move that fits into neither waits for another epoch (in `Backlog`).

All moves of the system are planned together, in one order that follows from the moves alone. So every instance that
knows the plan and the boundaries computes the same division without asking another one (global consensus).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvpool.policy.mell.boundaries import Boundaries, Link
from kvpool.policy.mell.budgets import Budgets
from kvpool.policy.mell.plan import Move

__all__ = ["Division", "Fit", "Part", "Way", "divide", "way_of"]


class Fit(Enum):
    """Which boundary a move is put under if it fits under both."""

    FIRST = "first"  # as KV cache: nothing is computed twice
    BEST = "best"  # where the larger part of the boundary stays free


class Way(Enum):
    """How a move goes."""

    KV = "kv"
    TOKENS = "tokens"


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a move that one epoch carries, because the whole move does not fit into an epoch.

    Attributes:
        move: Its requests keep running at the source until the last part has arrived; then the move is made.
        way: Of all its parts.
        tokens: Of this part.
    """

    move: Move
    way: Way
    tokens: int


@dataclass
class Division:
    """How each move goes.

    Attributes:
        made: All moves that are made in this epoch, in an order in which each has room when those before it are done.
        as_kv: Those of them that go as KV cache, in this order.
        as_tokens: Those of them that are prefilled at the destination, in this order.
        deferred: Moves that fit under no boundary, or that need the room of a deferred one.
        link_use: Tokens of KV cache on each link, with the fixed cost of each transfer.
        compute_use: Tokens that each GPU prefills.
        parts: Parts of moves that take several epochs, the last one too (only from `Backlog`).
        stopped: Deferred moves that leave their source now and wait for room as tokens (only from `Backlog`).
    """

    made: list[Move] = field(default_factory=list)
    as_kv: list[Move] = field(default_factory=list)
    as_tokens: list[Move] = field(default_factory=list)
    deferred: list[Move] = field(default_factory=list)
    link_use: dict[Link, int] = field(default_factory=dict)
    compute_use: dict[int, int] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)
    stopped: list[Move] = field(default_factory=list)

    def make(self, move: Move, way: Way) -> None:
        """Adds a move that is made."""
        self.made.append(move)
        (self.as_kv if way is Way.KV else self.as_tokens).append(move)


def divide(
    moves: Sequence[Move],
    boundaries: Boundaries,
    batches: Mapping[int, int],
    free: Mapping[int, int] | None = None,
    fit: Fit = Fit.FIRST,
) -> Division:
    """Divides the moves of one plan; no boundary is ever exceeded.

    It takes the moves in the order of the plan, which has room for each. With `free`, it also defers a move that needs
    the room of a deferred one; without it, the caller has to. The caller keeps the deferred moves, as `Backlog` does.

    Args:
        moves: The moves of all instances.
        boundaries: What migration may use.
        batches: Requests that run on each GPU; 0 where it is not named.
        free: Tokens free on each GPU before the first move.
        fit: Where a move goes that fits under both boundaries.
    """
    budgets = Budgets(boundaries, batches)
    found = Division(link_use=budgets.link_use, compute_use=budgets.compute_use)
    room = None if free is None else dict(free)
    waiting: set[Hashable] = set()
    for move in moves:
        behind = not waiting.isdisjoint(move.requests)  # its source is where a deferred move would have brought it
        fits = not behind and (room is None or room.get(move.destination, 0) >= move.tokens)
        way = way_of(move, move.tokens, budgets, fit) if fits else None
        if way is None:
            found.deferred.append(move)
            waiting.update(move.requests)
            continue
        found.make(move, way)
        if room is not None:
            room[move.destination] -= move.tokens
            room[move.source] = room.get(move.source, 0) + move.tokens
        if way is Way.KV:
            budgets.use_kv(move.source, move.destination, move.tokens)
        else:
            budgets.use_compute(move.destination, move.tokens)
    return found


def way_of(move: Move, tokens: int, budgets: Budgets, fit: Fit) -> Way | None:
    """How this many tokens of a move go in this epoch; None if neither boundary has room."""
    kv = budgets.kv_share(move.source, move.destination, tokens)
    computed = budgets.compute_share(move.destination, tokens)
    if kv < 0 and computed < 0:
        return None
    if computed < 0 or (kv >= 0 and (fit is Fit.FIRST or kv >= computed)):
        return Way.KV
    return Way.TOKENS
