"""Cycles of a directed graph: which members can be on one, and how amounts on edges fall apart into cycles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["components", "peel"]

Cycle = tuple[list[int], int]


def components(out: Sequence[Iterable[int]]) -> list[list[int]]:
    """The strongly connected components of two members or more (Tarjan's algorithm, without recursion).

    A debt between two of them is on no cycle.

    Args:
        out: For each member, those that it owes.
    """
    unseen = len(out)
    low = [unseen] * unseen  # the smallest number that the member reaches; `unseen` before the visit
    open_members: list[int] = []  # whose component is not complete
    is_open = [False] * unseen
    found: list[list[int]] = []
    visits = 0
    for root in range(unseen):
        if low[root] != unseen:
            continue
        number = {root: visits}  # of the members on the way from the root
        low[root] = visits
        visits += 1
        open_members.append(root)
        is_open[root] = True
        way = [(root, iter(out[root]))]
        while way:
            member, rest = way[-1]
            for other in rest:
                if low[other] == unseen:
                    number[other] = low[other] = visits
                    visits += 1
                    open_members.append(other)
                    is_open[other] = True
                    way.append((other, iter(out[other])))
                    break
                if is_open[other] and low[other] < low[member]:
                    low[member] = low[other]
            else:
                way.pop()
                if low[member] == number[member]:
                    first = len(open_members) - 1
                    while open_members[first] != member:
                        first -= 1
                    whole = open_members[first:]
                    del open_members[first:]
                    for each in whole:
                        is_open[each] = False
                    if len(whole) > 1:
                        found.append(sorted(whole))
                elif low[member] < low[way[-1][0]]:
                    low[way[-1][0]] = low[member]
    return found


def peel(members: int, edges: Sequence[tuple[int, int]], amounts: list[int]) -> list[Cycle]:
    """Takes cycles out of `amounts` until no edge that has an amount left is on a cycle.

    A walk goes on along the edges. As soon as an edge leads back to the walk, the smallest amount on this cycle is
    taken from each of its edges. Of several edges back, that which closes the shortest cycle is taken. A member
    without edges onward is left and is never visited again: amounts only fall, so no cycle can come to it.

    Args:
        members: Are numbered from 0.
        edges: From, to.
        amounts: Of the edges. Is reduced.

    Returns:
        The edges of each cycle in its order, and the amount that was taken from each of them.
    """
    begins, ends = [edge[0] for edge in edges], [edge[1] for edge in edges]
    out: list[list[int]] = [[] for _ in range(members)]
    for at in sorted(range(len(edges)), key=amounts.__getitem__):  # the largest amounts are tried first: from the end
        if amounts[at]:
            out[begins[at]].append(at)
    depth = [-1] * members  # on the walk
    found: list[Cycle] = []
    for root in range(members):
        walk: list[int] = []
        member = root
        depth[root] = 0
        while True:
            onward = out[member]
            back, deepest = -1, -1
            for at in onward:
                if depth[ends[at]] > deepest and amounts[at]:
                    back, deepest = at, depth[ends[at]]
            if back >= 0:
                cycle = [*walk[deepest:], back]
                least = min(map(amounts.__getitem__, cycle))
                cut = -1
                for place, at in enumerate(cycle):
                    amounts[at] -= least
                    if cut < 0 and not amounts[at]:
                        cut = deepest + place
                found.append((cycle, least))
                if cut < len(walk):
                    for at in walk[cut:]:
                        depth[ends[at]] = -1
                    member = begins[walk[cut]]
                    del walk[cut:]
                continue
            while onward and not amounts[onward[-1]]:
                onward.pop()
            if onward:
                walk.append(onward[-1])
                member = ends[onward[-1]]
                depth[member] = len(walk)
                continue
            depth[member] = -1
            if not walk:
                break
            member = begins[walk.pop()]
            out[member].pop()  # it leads to where nothing goes on
    return found
