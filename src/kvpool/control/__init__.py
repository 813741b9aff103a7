"""What touches the world for the policies: it observes, asks one of them, and carries out what it says."""

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
