"""Reading an argument whose own methods may raise anything."""

from __future__ import annotations

import operator
from typing import Any, cast

import numpy as np

from kvpool.errors import ArgumentError, ArgumentTypeError

__all__ = ["flag_from", "int_from", "shown"]

_LENGTH_MAX = 200


def int_from(value: object, what: str) -> int:
    """The value as an int: what Python takes as an index, but no bool.

    Args:
        value: The argument.
        what: What the message calls it.

    Raises:
        ArgumentTypeError: It is not an int. If its `__index__` has raised, that is the cause.
    """
    cause: Exception | None = None
    if not isinstance(value, bool):
        try:
            return operator.index(cast(Any, value))
        except Exception as error:
            cause = error if hasattr(type(value), "__index__") else None
    raise ArgumentTypeError(f"{what} must be an int, not {type(value).__name__} ({shown(value)})") from cause


def flag_from(value: object, what: str) -> bool:
    """The value, if it is a bool of Python or NumPy.

    Raises:
        ArgumentTypeError: It is not a bool.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise ArgumentTypeError(f"{what} must be a bool, not {type(value).__name__} ({shown(value)})")
    return bool(value)


def seconds_from(value: object, what: str) -> float:
    """A number of seconds.

    Raises:
        ArgumentTypeError: It is no number.
        ArgumentError: It is below 0, infinite or not a number.
    """
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise ArgumentTypeError(f"{what} must be a number of seconds, not {type(value).__name__} ({shown(value)})")
    if not 0 <= value < 1 << 40:
        raise ArgumentError(f"{what} is {shown(value)}; it must be 0 or more seconds")
    return float(value)


def shown(value: object) -> str:
    """The value in a message: its repr, not too long. Never raises an Exception."""
    try:
        text = repr(value)
    except Exception:  # also of an int with more digits than Python prints
        if isinstance(value, int):
            return f"an int of {int.bit_length(value)} bits"
        return f"a {type(value).__name__}"
    return text if len(text) <= _LENGTH_MAX else f"{text[:_LENGTH_MAX]}..."
