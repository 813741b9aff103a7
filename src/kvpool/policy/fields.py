"""Checks values from JSON, field by field; errors name the field.

Profiles come from other machines, and a wrong one would mislead a cluster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from kvpool.errors import ArgumentError

__all__ = ["count_of", "format_of", "list_of", "object_of", "seconds_of", "text_of"]


def object_of(value: Any, where: str, required: Sequence[str] = ()) -> Mapping[str, Any]:
    """An object that has the fields `required`. Raises ArgumentError for anything else, as all of these do."""
    if not isinstance(value, dict):
        raise ArgumentError(f"{where} is {type(value).__name__}, not an object")
    if missing := [name for name in required if name not in value]:
        raise ArgumentError(f"{where} has no {', '.join(missing)}")
    return value


def format_of(fields: Mapping[str, Any], name: str, version: int) -> None:
    """Checks that an object declares this format and version."""
    if fields["format"] != name or fields["version"] != version:
        raise ArgumentError(
            f"not a profile that this version reads: format {fields['format']!r}, version {fields['version']!r}; "
            f"it reads {name!r}, version {version}"
        )


def list_of(value: Any, where: str) -> list[Any]:
    """A list of anything."""
    if not isinstance(value, list):
        raise ArgumentError(f"{where} is {type(value).__name__}, not a list")
    return value


def count_of(value: Any, where: str, least: int) -> int:
    """A whole number from `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ArgumentError(f"{where} is {value!r}, not a whole number from {least}")
    return value


def seconds_of(value: Any, where: str) -> float:
    """A number above 0."""
    try:
        seconds = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0
    except OverflowError:  # JSON has whole numbers of any length
        seconds = 0.0
    if not isfinite(seconds) or seconds <= 0:
        raise ArgumentError(f"{where} is {value!r}, not a number above 0")
    return seconds


def text_of(value: Any, where: str) -> str:
    """A string."""
    if not isinstance(value, str):
        raise ArgumentError(f"{where} is {type(value).__name__}, not a string")
    return value
