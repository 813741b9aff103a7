"""Checks of arguments that several policies have: counts, amounts, shares of the compute, names of models."""

from __future__ import annotations

from collections.abc import Collection
from math import inf, isfinite

from kvpool.errors import ArgumentError, ArgumentTypeError

__all__ = ["known", "number_above_0", "power_of_2", "share_of", "whole"]


def whole(value: object, what: str, least: int = 0) -> int:
    """An int from `least`. Raises ArgumentTypeError for another type or a bool, ArgumentError for a smaller one."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ArgumentTypeError(f"{what} must be an int, not {type(value).__name__}")
    if value < least:
        raise ArgumentError(f"{what} is {value}; it must be at least {least}", value=value, minimum=least)
    return value


def number_above_0(value: object, what: str, zero: bool = False) -> float:
    """A finite number above 0, or from 0 on with `zero`. Raises ArgumentTypeError, ArgumentError."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ArgumentTypeError(f"{what} must be a number, not {type(value).__name__}")
    try:
        result = float(value)
    except OverflowError:
        result = inf
    if not isfinite(result) or result < 0 or (result == 0 and not zero):
        raise ArgumentError(f"{what} is {value}; it must be {'at least' if zero else 'above'} 0, and finite")
    return result


def known(model: str, models: Collection[str]) -> str:
    """The name of a model that is there. Raises ArgumentError for an unknown one."""
    if model not in models:
        raise ArgumentError(f"no model is called {model!r}; there are {', '.join(sorted(models)) or 'no models'}")
    return model


def share_of(value: object, what: str) -> float:
    """A part of the compute: above 0, at most 1. Raises ArgumentError, or ArgumentTypeError for what is no number."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ArgumentTypeError(f"{what} must be a number, not {type(value).__name__}")
    if not isfinite(value) or not 0 < value <= 1:
        raise ArgumentError(f"{what} is {value}; a share is above 0 and at most 1")
    return float(value)


def power_of_2(value: object, what: str) -> int:
    """1, 2, 4, and so on. Raises as `whole`; ArgumentError for another int, too."""
    number = whole(value, what, 1)
    if number & (number - 1):
        raise ArgumentError(f"{what} is {number}; it must be a power of two", value=number)
    return number
