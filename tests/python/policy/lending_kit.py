"""Shared by the tests of lending: rows by hand, and what naive code finds in a graph of debts."""

from __future__ import annotations

from hypothesis import strategies as st

from kvpool import DRAM, HBM
from kvpool.policy import lending

# Few members, so that cycles are frequent; debts on both sides of each `least`.
PAIRS = st.tuples(st.integers(1, 6), st.integers(1, 6)).filter(lambda pair: pair[0] != pair[1])
DEBTS = st.dictionaries(PAIRS, st.integers(0, 40), max_size=18)


def row(member, free=100, *, host="a", term=1, version=1, lend_max=80, lent=0, debts=None, dram=0, blocks=400):
    return lending.Row(member, term, version, host, blocks, {HBM: free, DRAM: dram}, lend_max, lent, debts or {})


def ledger_of(*rows):
    ledger = lending.Ledger()
    for each in rows:
        assert ledger.take(each)
    return ledger


def has_cycle(pairs) -> bool:
    """Whether directed edges have a cycle: something is left when edges to where nothing goes on are taken away."""
    left = set(pairs)
    while ends := {pair for pair in left if pair[1] not in {begin for begin, _ in left}}:
        left -= ends
    return bool(left)


def net_of(debts) -> dict[int, int]:
    net: dict[int, int] = {}
    for (debtor, creditor), blocks in debts.items():
        net[debtor] = net.get(debtor, 0) + blocks
        net[creditor] = net.get(creditor, 0) - blocks
    return {member: blocks for member, blocks in net.items() if blocks}


def best_circulation(debts) -> int:
    """The most blocks that can be cancelled: cycles of the residual graph that gain are cancelled until no more do.

    Klein's algorithm; it shares no step with the code that is tested.
    """
    room = {pair: blocks for pair, blocks in debts.items() if blocks}
    used = dict.fromkeys(room, 0)
    members = sorted({member for pair in room for member in pair})
    while True:
        edges = [(a, b, -1, (a, b)) for (a, b), left in room.items() if left]
        edges += [(b, a, 1, (a, b)) for (a, b), blocks in used.items() if blocks]
        distance = dict.fromkeys(members, 0)
        before: dict[int, tuple[int, int, tuple[int, int]]] = {}
        changed = None
        for _ in members:
            changed = None
            for begin, end, cost, pair in edges:
                if distance[begin] + cost < distance[end]:
                    distance[end] = distance[begin] + cost
                    before[end] = (begin, cost, pair)
                    changed = end
            if changed is None:
                break
        if changed is None:
            return sum(used.values())
        for _ in members:
            changed = before[changed][0]
        cycle, at = [], changed
        while not cycle or at != changed:
            at, cost, pair = before[at]
            cycle.append((cost, pair))
        amount = min(room[pair] if cost < 0 else used[pair] for cost, pair in cycle)
        for cost, pair in cycle:
            room[pair] += cost * amount
            used[pair] -= cost * amount
