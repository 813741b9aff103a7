"""Numbers that applications give: of Python or NumPy, and Python's from then on."""

from __future__ import annotations

from numbers import Integral, Real

from kvpool.errors import ArgumentError
from kvpool.policy.fields import count_of, seconds_of

__all__ = ["above_zero", "count_from"]


def count_from(value: object, what: str, least: int) -> int:
    """A whole number from `least`.

    Args:
        value: The argument; a bool does not count.
        what: What the message calls it.
        least: The lowest.

    Raises:
        ArgumentError: It is anything else.
    """
    is_other = isinstance(value, Integral) and not isinstance(value, int)
    return count_of(int(value) if is_other else value, what, least)  # type: ignore[call-overload]


def above_zero(value: object, what: str) -> float:
    """A finite number above 0: of seconds, or of bytes a second.

    Args:
        value: The argument; a bool does not count.
        what: What the message calls it.

    Raises:
        ArgumentError: It is anything else.
    """
    is_other = isinstance(value, Real) and not isinstance(value, int | float)
    try:
        return seconds_of(float(value) if is_other else value, what)  # type: ignore[arg-type]
    except OverflowError:  # of a fraction
        raise ArgumentError(f"{what} is too large") from None
