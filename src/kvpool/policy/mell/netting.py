"""Moves that are not worth making."""

from __future__ import annotations

from kvpool.policy.mell.plan import Move

__all__ = ["without_detours"]


def without_detours(moves: list[Move]) -> list[Move]:
    """The same placement by fewer moves: an item that moves twice goes only to its last GPU, at its last move.

    Until then it stays at its first GPU. So a detour is kept if another item would need that room meanwhile: the moves
    that are left have room at each step, as the given ones had.
    """
    kept: list[Move | None] = list(moves)
    last: dict[tuple[object, ...], int] = {}
    arrived: dict[int, int] = {}  # the last move to each GPU
    for index, move in enumerate(moves):
        first = last.get(move.requests)
        earlier = None if first is None else kept[first]
        direct = earlier is not None and earlier.destination == move.source
        if first is not None and earlier is not None and direct and arrived.get(earlier.source, -1) <= first:
            kept[first] = None
            stays = earlier.source == move.destination
            kept[index] = None if stays else Move(move.requests, earlier.source, move.destination, move.tokens)
        last[move.requests] = index
        arrived[move.destination] = index
    return [move for move in kept if move is not None]
