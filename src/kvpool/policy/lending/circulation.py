"""Which part of all debts can be cancelled along cycles: as a flow that carries what must be left.

Cancelling a cycle changes the net debt of no member. So what is left carries the net debts, and as little is left as
possible if it carries each on the shortest way along debts that exist. That is a flow of least cost: net debtors are
its sources, net creditors its sinks, each debt is an edge of cost 1 with the debt as its capacity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["WORK", "least_remaining"]

Numbers = npt.NDArray[np.int64]

# Edges that may be looked at for shortest ways; after that any way is taken.
WORK: Final = 800_000

# Costs are compared first, then the number of edges on the way, so that edges on shortest ways make no cycle.
_COST: Final = 1 << 20
_FAR: Final = 1 << 40


def least_remaining(
    members: int, edges: Sequence[tuple[int, int]], debts: Sequence[int], work: int = WORK, least: int = 0
) -> list[int]:
    """The least that must be left of each debt.

    Successive shortest ways, many at a time: all edges that are on a shortest way from a net debtor to the nearest net
    creditor take as much as they can (a blocking flow), then distances are found anew. With these distances as
    potentials no edge is ever shorter than it looks, so the flow has the least cost (primal-dual). The last few blocks
    take most of the passes. So after `work` any way with the fewest edges is taken instead: then more is left than
    must be, and what is left may have cycles.

    Args:
        members: Are numbered from 0.
        edges: Debtor, creditor: all of one strongly connected component, each pair at most once.
        debts: Of the edges, above 0.
        work: How many edges may be looked at before any way is taken.
        least: So much of each debt is to be cancelled; it must be possible.
    """
    return _Flow(members, edges, debts, least).run(work)


class _Flow:
    """The residual graph: for each debt an edge forward, with the room that is left, and one backward, with the flow.

    Edges are sorted by where they begin.
    """

    def __init__(self, members: int, edges: Sequence[tuple[int, int]], debts: Sequence[int], least: int) -> None:
        pairs = np.array(edges, dtype=np.int64).reshape(-1, 2)
        size: Numbers = np.array(debts, dtype=np.int64)
        count = len(pairs)
        begin, end = np.concatenate([pairs[:, 0], pairs[:, 1]]), np.concatenate([pairs[:, 1], pairs[:, 0]])
        order = np.argsort(begin, kind="stable")
        place = np.empty(2 * count, dtype=np.int64)
        place[order] = np.arange(2 * count)
        opposite = np.empty(2 * count, dtype=np.int64)
        opposite[place] = np.concatenate([place[count:], place[:count]])
        self._members = members
        self._begin, self._end = begin[order], end[order]
        self._is_debt = order < count
        self._from: list[int] = self._begin.tolist()
        self._to: list[int] = self._end.tolist()
        self._opposite: list[int] = opposite.tolist()
        self._backward: list[int] = place[count:].tolist()  # of each debt
        self._room: list[int] = np.concatenate([size - least, np.zeros_like(size)])[order].tolist()
        net = np.zeros(members, dtype=np.int64)
        np.add.at(net, pairs[:, 0], size)
        np.subtract.at(net, pairs[:, 1], size)
        self._net: list[int] = net.tolist()  # above 0: still to be sent; below 0: still to be received

    def run(self, work: int) -> list[int]:
        shortest = np.where(self._is_debt, _COST + 1, 1 - _COST)
        fewest = np.ones_like(shortest)
        while any(self._net):
            lengths = shortest if work > 0 else fewest
            ways, looked = self._ways(lengths)
            work -= looked
            self._send(ways)
        return [self._room[at] for at in self._backward]

    def _ways(self, lengths: Numbers) -> tuple[list[list[int]], int]:
        """The edges on shortest ways to net creditors, by where they begin, and how many edges were looked at."""
        free = np.flatnonzero(np.array(self._room))
        begin, end, length = self._begin[free], self._end[free], lengths[free]
        first = np.flatnonzero(np.r_[True, begin[1:] != begin[:-1]])
        heads = begin[first]
        distance = np.where(np.array(self._net) < 0, 0, _FAR)
        looked = 0
        while True:  # Bellman-Ford: all edges at a time
            looked += len(free)
            known = distance[heads]
            better = np.minimum(known, np.minimum.reduceat(distance[end] + length, first))
            if np.array_equal(known, better):
                break
            distance[heads] = better
        on_way = (distance[begin] == distance[end] + length) & (distance[begin] < _FAR // 2)
        ways: list[list[int]] = [[] for _ in range(self._members)]
        for edge in free[on_way].tolist():
            ways[self._from[edge]].append(edge)
        return ways, looked

    def _send(self, ways: list[list[int]]) -> None:
        """Sends along these edges, which make no cycle, until each way from a net debtor has a full edge."""
        net, room, to = self._net, self._room, self._to
        for source in range(self._members):
            way: list[int] = []
            member = source
            while net[source] > 0:
                if net[member] < 0:
                    cut = self._push(source, member, way)
                    if cut < len(way):
                        member = self._from[way[cut]]
                        del way[cut:]
                    continue  # from a full creditor the way may go on
                onward = ways[member]
                while onward and not room[onward[-1]]:
                    onward.pop()
                if onward:
                    way.append(onward[-1])
                    member = to[onward[-1]]
                elif way:
                    member = self._from[way.pop()]
                    ways[member].pop()
                else:
                    break

    def _push(self, source: int, sink: int, way: list[int]) -> int:
        """Sends what one way can take; the place of its first full edge."""
        room, opposite = self._room, self._opposite
        blocks = min(self._net[source], -self._net[sink])
        for edge in way:
            blocks = min(blocks, room[edge])
        cut = len(way)
        for place, edge in enumerate(way):
            room[edge] -= blocks
            room[opposite[edge]] += blocks
            if not room[edge] and place < cut:
                cut = place
        self._net[source] -= blocks
        self._net[sink] += blocks
        return cut
