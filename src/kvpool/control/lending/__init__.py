"""Lending among the members of a cluster: each publishes what it lends and owes, and borrows where there is room.

The decisions are those of kvpool.policy.lending; docs/how-to/lending.md shows how an engine uses this.
"""

from kvpool.control.lending.lending import Lending
from kvpool.control.lending.members import LendingMembers
from kvpool.control.lending.records import row_from, row_json

__all__ = ["Lending", "LendingMembers", "row_from", "row_json"]
