"""Live migration of one request between two instances: both sides' state machines, and the way that it goes.

docs/adr/0040-live-migration.md explains the protocol; kvpool.control.migration carries it out.
"""

from kvpool.policy.migration.destination import Destination, Work
from kvpool.policy.migration.messages import DestinationSays, MigrationId, SourceSays, Way
from kvpool.policy.migration.progress import Progress, StopRules
from kvpool.policy.migration.registry import Arrivals, Departures
from kvpool.policy.migration.source import Source
from kvpool.policy.migration.terms import FIRST, OutputGate, Term
from kvpool.policy.migration.ways import Pace, WayChoice, WayCosts
from kvpool.policy.migration.wire import MESSAGE_BYTES_MAX, check_names, decode, encode

__all__ = [
    "FIRST",
    "MESSAGE_BYTES_MAX",
    "Arrivals",
    "Departures",
    "Destination",
    "DestinationSays",
    "MigrationId",
    "OutputGate",
    "Pace",
    "Progress",
    "Source",
    "SourceSays",
    "StopRules",
    "Term",
    "Way",
    "WayChoice",
    "WayCosts",
    "Work",
    "check_names",
    "decode",
    "encode",
]
