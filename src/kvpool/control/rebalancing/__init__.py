"""Rebalancing by epochs: one plan of all instances says which requests move, and which instances start and end.

The decisions are those of kvpool.policy.rebalancing; docs/how-to/migration.md shows how an engine uses this.
"""

from kvpool.control.rebalancing.engine import RebalancedEngine
from kvpool.control.rebalancing.epochs import Epochs
from kvpool.control.rebalancing.members import MemberStates, MoveCounts, Said, moves_of
from kvpool.control.rebalancing.rebalancer import Rebalancer
from kvpool.control.rebalancing.totals import RebalancingTotals

__all__ = [
    "Epochs",
    "MemberStates",
    "MoveCounts",
    "RebalancedEngine",
    "Rebalancer",
    "RebalancingTotals",
    "Said",
    "moves_of",
]
