"""The I/O around the policies: observes, asks a policy, and executes its decisions."""

from kvpool.control.boundaries import MeasuredLink, load_boundaries, profile_boundaries, save_boundaries
from kvpool.control.profiling import load_profile, profile_ops, save_profile

__all__ = [
    "MeasuredLink",
    "load_boundaries",
    "load_profile",
    "profile_boundaries",
    "profile_ops",
    "save_boundaries",
    "save_profile",
]
