"""Token ids as arrays, from everything that a pool's verbs accept.

An array is passed on unchanged: the index checks it. A list becomes an int32 array by Python's own arrays, which take
only ints and are as fast as NumPy, which would round. Only a list that they refuse is checked one by one, to name the
error.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Sequence
from typing import Any, Final, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from kvpool.errors import ArgumentError, ArgumentTypeError
from kvpool.types import TokenVector

__all__ = ["Tokens", "as_array", "checked"]

Tokens: TypeAlias = npt.NDArray[np.int32] | npt.NDArray[np.int64]

_SIGNED: Final = "ilq"  # NumPy's codes of int32 and int64
_LEAST: Final = -(1 << 31)
_MOST: Final = (1 << 31) - 1
_NONE: Final = np.zeros(0, dtype=np.int32)


def as_array(tokens: TokenVector) -> Tokens:
    """An array of int32 or int64. An array is returned unchecked: see `checked`.

    Raises:
        ArgumentError: An int that does not fit in int32, or bytes that are no whole number of int32.
        ArgumentTypeError: Some are no ints.
    """
    if isinstance(tokens, np.ndarray):
        return tokens
    if isinstance(tokens, list | tuple):
        try:
            numbers = array("i", tokens if isinstance(tokens, list) else list(tokens))
        except (TypeError, OverflowError):
            return _one_by_one(tokens)
        return np.frombuffer(numbers, dtype=np.int32) if numbers else _NONE
    if isinstance(tokens, bytes | bytearray) or (isinstance(tokens, memoryview) and tokens.format in ("B", "c")):
        return _of_bytes(tokens)
    try:
        others = np.asarray(tokens)
    except (TypeError, ValueError, OverflowError):
        return _one_by_one(tokens)
    if others.ndim == 1 and others.dtype.char in _SIGNED:
        return others
    return checked(others) if isinstance(tokens, memoryview) else _one_by_one(tokens)


def checked(tokens: Tokens) -> Tokens:
    """Returns the array.

    Raises:
        ArgumentError: Not one dimension, or an int that does not fit in int32.
        ArgumentTypeError: Neither int32 nor int64.
    """
    if tokens.ndim != 1:
        raise ArgumentError(f"tokens must have one dimension, and have {tokens.ndim}")
    if tokens.dtype.char not in _SIGNED or not tokens.dtype.isnative:
        raise ArgumentTypeError(f"tokens must be int32 or int64, and are {tokens.dtype}")
    if tokens.itemsize > 4:
        beyond = (tokens < _LEAST) | (tokens > _MOST)
        if beyond.any():
            raise _out_of_range(int(beyond.argmax()), int(tokens[beyond.argmax()]))
    return tokens


def _of_bytes(tokens: bytes | bytearray | memoryview) -> Tokens:
    view = memoryview(tokens)
    if view.nbytes % 4 or view.ndim != 1 or not view.contiguous:
        raise ArgumentError(f"bytes as tokens are int32 without gaps, and {view.nbytes} bytes are not")
    return np.frombuffer(tokens, dtype=np.int32)


def _one_by_one(tokens: object) -> Tokens:
    if isinstance(tokens, str) or not isinstance(tokens, Sequence):
        raise ArgumentTypeError(
            f"tokens must be a NumPy array, a list, or a buffer of int32 or int64, and are {type(tokens).__name__}"
        )
    numbers = []
    for position, each in enumerate(tokens):
        if not hasattr(each, "__index__"):
            raise ArgumentTypeError(f"tokens[{position}] is {type(each).__name__}, not an int")
        number = operator.index(cast(Any, each))
        if not _LEAST <= number <= _MOST:
            raise _out_of_range(position, number)
        numbers.append(number)
    return np.array(numbers, dtype=np.int32)


def _out_of_range(position: int, value: int) -> ArgumentError:
    return ArgumentError(f"tokens[{position}] = {value} does not fit in int32", position=position)
