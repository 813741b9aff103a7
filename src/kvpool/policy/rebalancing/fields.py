"""Reading what another instance has published: every field is checked."""

from __future__ import annotations

from typing import Final

__all__ = ["NAME_BYTES_MAX", "UNREADABLE", "count_in", "name_in", "number_in"]

NAME_BYTES_MAX: Final = 255  # of the name of a request, as UTF-8
_COUNT_MAX: Final = (1 << 53) - 1  # what JSON of any reader keeps exactly
_NUMBER_MAX: Final = 1 << 48  # of a plan: far above what planners count to, and there are higher ones to go on with

# What another machine's fields may raise where they are read. An ArgumentError is a ValueError.
UNREADABLE: Final = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)


def count_in(value: object) -> int:
    """An int from 0 to 2^53 - 1. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _COUNT_MAX:
        raise ValueError(f"{value!r} is no count")
    return value


def number_in(value: object) -> int:
    """A part of a plan's number: an int from 0 to 2^48. Raises ValueError."""
    if (found := count_in(value)) > _NUMBER_MAX:
        raise ValueError(f"{found} is no number of a plan")
    return found


def name_in(value: object) -> str:
    """The name of a request. Raises ValueError."""
    if not isinstance(value, str) or not 0 < len(value.encode("utf-8", "surrogatepass")) <= NAME_BYTES_MAX:
        raise ValueError(f"{value!r} is no name of a request")
    return value
