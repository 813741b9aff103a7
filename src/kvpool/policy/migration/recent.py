"""A table that does not grow with the life of its process: only the latest keys are in it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["Recent"]

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class Recent(Generic[_Key, _Value]):
    """The latest keys, each with a value: a process meets any number of incarnations in its life. Not thread-safe.

    Args:
        most: So many keys are remembered.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._found: dict[_Key, _Value] = {}  # the earliest first

    def __contains__(self, key: _Key) -> bool:
        return key in self._found

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: _Key) -> _Value | None:
        """The value of a key, which does not become later by that; None if it is not there."""
        return self._found.get(key)

    def put(self, key: _Key, value: _Value) -> _Key | None:
        """Makes this key the latest, with this value. The key that is forgotten for it; None if there was room."""
        self._found.pop(key, None)
        self._found[key] = value
        if len(self._found) <= self._most:
            return None
        earliest = next(iter(self._found))
        del self._found[earliest]
        return earliest

    def discard(self, key: _Key) -> None:
        """Forgets a key, if it is there."""
        self._found.pop(key, None)
