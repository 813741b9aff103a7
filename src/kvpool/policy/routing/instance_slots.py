"""The slots of the instances of a load table, and the arrays of their values, indexed by slot.

A decision reads the values of a few instances, or of all at once; a change writes those of one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvpool.errors import ArgumentError, ArgumentTypeError

__all__ = ["Bools", "Floats", "InstanceSlots"]

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_IDS = 1 << 14  # instance ids are below that (kvpool.types)
_ROOM = 16
_CAPACITY_LEAST, _CAPACITY_MOST = 1e-100, 1e100  # within them, sums and quotients are finite, and not 0


class InstanceSlots:
    """The present instances. A slot is an instance's index in the arrays; it changes when another instance leaves.

    Attributes:
        slot_of: As `slots`, of one. NumPy's own function, because a decision may call it for every holder of a prompt.
    """

    def __init__(self) -> None:
        self._slot_of = np.full(_IDS, -1, dtype=np.int64)
        self.slot_of: Callable[[int], int] = self._slot_of.item
        self._queues: list[deque[tuple[int, float]]] = []  # of (number, work), in the order of arrival
        self._ids = np.empty(_ROOM, dtype=np.int64)
        self._open = np.empty(_ROOM, dtype=np.bool_)
        self._model = np.empty(_ROOM, dtype=np.int64)
        self._columns = np.empty((6, _ROOM))
        self._name_columns()

    def __len__(self) -> int:
        return len(self._queues)

    def slot(self, instance: int) -> int:
        """Raises ArgumentError for an instance that is not there."""
        slot: int = self._slot_of.item(instance) if 0 <= instance < _IDS else -1
        if slot < 0:
            raise ArgumentError(f"instance {instance} is not there")
        return slot

    def slots(self, instances: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Slots of many; -1 for those that are not there. REQUIRES: ids below 2^14."""
        return self._slot_of[instances]

    def id_of(self, slot: int) -> int:
        """The instance."""
        instance: int = self._ids.item(slot)
        return instance

    def is_open_at(self, slot: int) -> bool:
        """Whether it gets new work."""
        return bool(self._open.item(slot))

    def has_open(self, instance: int) -> bool:
        """Whether an instance is there and gets new work. REQUIRES: an id below 2^14."""
        slot: int = self._slot_of.item(instance)
        return slot >= 0 and bool(self._open[slot])

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Instances by slot; a view."""
        return self._ids[: len(self)]

    @property
    def models(self) -> npt.NDArray[np.int64]:
        """What `add` was given, by slot; a view."""
        return self._model[: len(self)]

    def renumber_model(self, model: int, to: int) -> None:
        """Gives the instances of one model number another one."""
        self.models[self.models == model] = to

    @property
    def is_open(self) -> Bools:
        """Whether each gets new work, by slot; a view."""
        return self._open[: len(self)]

    # ---- inside

    def _enter(self, instance: int, model: int, capacity: float, now: float) -> int:
        """Gives it the last slot.

        Raises:
            ArgumentError: It is there already, or is no id, or its capacity is out of range.
            ArgumentTypeError: Its capacity is no number.
        """
        try:
            in_range = _CAPACITY_LEAST <= capacity <= _CAPACITY_MOST
        except TypeError:
            raise ArgumentTypeError(f"capacity must be a number, not {type(capacity).__name__}") from None
        if not in_range:
            raise ArgumentError(f"capacity is {capacity}; it must be from {_CAPACITY_LEAST} to {_CAPACITY_MOST}")
        if not 0 <= instance < _IDS:
            raise ArgumentError(f"instance is {instance}; it must be from 0 to {_IDS - 1}")
        if self._slot_of[instance] >= 0:
            raise ArgumentError(f"instance {instance} is there already")
        slot = len(self)
        if slot == len(self._ids):
            self._grow()
        self._ids[slot], self._open[slot], self._model[slot] = instance, True, model
        self._columns[:, slot] = capacity, now, 0.0, 0.0, 0.0, 0.0
        self._slot_of[instance] = slot
        self._queues.append(deque())
        return slot

    def _leave(self, slot: int) -> None:
        """Removes it; the instance of the last slot takes its slot."""
        last = len(self) - 1
        self._slot_of[self._ids[slot]] = -1
        if slot != last:
            self._slot_of[self._ids[last]] = slot
        for array in (self._ids, self._open, self._model):
            array[slot] = array[last]
        self._columns[:, slot] = self._columns[:, last]
        self._queues[slot] = self._queues[last]
        self._queues.pop()

    def _grow(self) -> None:
        self._ids, self._open, self._model = (
            np.concatenate([old, np.empty_like(old)]) for old in (self._ids, self._open, self._model)
        )
        self._columns = np.concatenate([self._columns, np.empty_like(self._columns)], axis=1)
        self._name_columns()

    def _name_columns(self) -> None:
        self._capacity, self._joined, self._unfinished, self._head, self._since, self._done = self._columns
