"""Ordered sets of ids under small integer keys: the structures that a decision is looked up in."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

__all__ = ["Ordered"]

Id = TypeVar("Id", bound=Hashable)

_SHIFT = 9  # a word of 512 bits: Python's integers make one operation of it
_WORD = 1 << _SHIFT
_MASK = _WORD - 1


class Ordered(Generic[Id]):
    """Ids by key, keys in order. Keys are integers of 0 to `largest`; ids under one key stand in the order they came.

    A tree of bit words over the keys that are used: level 0 has a bit a key, each level above a bit a word below.
    Adding, removing and looking up the next key touch one word a level, log(largest) / 9 of them, however many ids
    there are. Balanced trees would do it in log(ids), slower in Python and with more code.
    """

    __slots__ = ("_ids", "_largest", "_levels", "_top")

    def __init__(self, largest: int) -> None:
        self._ids: dict[int, dict[Id, None]] = {}
        self._largest = largest
        self._levels: list[dict[int, int]] = [{}]
        reach = largest >> _SHIFT
        while reach:
            self._levels.append({})
            reach >>= _SHIFT
        self._top = len(self._levels) - 1

    def __bool__(self) -> bool:
        return bool(self._ids)

    def add(self, key: int, number: Id) -> None:
        """Puts an id, which is not there yet, under a key."""
        ids = self._ids.get(key)
        if ids is not None:
            ids[number] = None
            return
        self._ids[key] = {number: None}
        for level in self._levels:
            word, bit = key >> _SHIFT, 1 << (key & _MASK)
            bits = level.get(word, 0)
            level[word] = bits | bit
            if bits:
                return
            key = word

    def remove(self, key: int, number: Id) -> None:
        """Takes an id away from the key that it stands under."""
        ids = self._ids[key]
        del ids[number]
        if ids:
            return
        del self._ids[key]
        for level in self._levels:
            word, bit = key >> _SHIFT, 1 << (key & _MASK)
            bits = level[word] & ~bit
            if bits:
                level[word] = bits
                return
            del level[word]
            key = word

    def at_least(self, key: int) -> Iterator[tuple[int, Id]]:
        """(key, id) from `key` upwards. Any change of the set invalidates it."""
        found = self._next(max(0, key))
        while found is not None:
            for number in self._ids[found]:
                yield found, number
            found = self._next(found + 1)

    def at_most(self, key: int) -> Iterator[tuple[int, Id]]:
        """(key, id) from `key` downwards. Any change of the set invalidates it."""
        found = self._previous(min(key, self._largest))
        while found is not None:
            for number in self._ids[found]:
                yield found, number
            found = self._previous(found - 1)

    def _next(self, key: int) -> int | None:
        """The smallest used key that is `key` or more."""
        level = 0
        while level <= self._top:
            word = key >> _SHIFT
            bits = self._levels[level].get(word, 0) >> (key & _MASK)
            if bits:
                key += (bits & -bits).bit_length() - 1
                break
            key = word + 1
            level += 1
        else:
            return None
        for below in reversed(self._levels[:level]):
            bits = below[key]
            key = (key << _SHIFT) + (bits & -bits).bit_length() - 1
        return key

    def _previous(self, key: int) -> int | None:
        """The largest used key that is `key` or less."""
        level = 0
        while level <= self._top:
            if key < 0:
                return None
            word = key >> _SHIFT
            bits = self._levels[level].get(word, 0) & ((2 << (key & _MASK)) - 1)
            if bits:
                key = (word << _SHIFT) + bits.bit_length() - 1
                break
            key = word - 1
            level += 1
        else:
            return None
        for below in reversed(self._levels[:level]):
            key = (key << _SHIFT) + below[key].bit_length() - 1
        return key
