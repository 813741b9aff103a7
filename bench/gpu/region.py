"""A region of a GPU's memory, for code that stamps and checks it."""

from __future__ import annotations

from typing import Any

from bench.gpu.device import Device
from bench.transfer.side import Side


class OnDevice(Side):
    """See bench/transfer/side.py. The region is a view of the host's copy, which goes there and back as a whole.

    Attributes:
        _device: The first GPU.
        _base: Where its memory begins.
        _host: The copy of it.
    """

    _device: Device
    _base: int
    _host: Any

    def stamp(self, number: int) -> None:
        super().stamp(number)
        self._device.write(self._base, self._host)

    def check(self, number: int, slots: list[int]) -> None:
        self._device.read(self._base, self._host)
        super().check(number, slots)

    def check_others(self, slots: list[int]) -> None:
        self._device.read(self._base, self._host)
        super().check_others(slots)
