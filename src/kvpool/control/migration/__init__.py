"""Moves requests between engines while they decode, by the protocol of kvpool.policy.migration.

docs/how-to/migration.md shows how an engine uses this.
"""

from kvpool.control.migration.engine import Arrived, MigratingEngine, RequestProgress, Stopped
from kvpool.control.migration.evidence import Proof
from kvpool.control.migration.handle import Migrated, Migration
from kvpool.control.migration.migrations import Migrations
from kvpool.control.migration.talking import Timing
from kvpool.control.migration.totals import MigrationTotals

__all__ = [
    "Arrived",
    "Migrated",
    "MigratingEngine",
    "Migration",
    "MigrationTotals",
    "Migrations",
    "Proof",
    "RequestProgress",
    "Stopped",
    "Timing",
]
