"""Which memory an argument names: a medium, or a device."""

from __future__ import annotations

from typing import Final

from kvpool.arguments import int_from, shown
from kvpool.errors import ArgumentError, ArgumentTypeError
from kvpool.types.medium import DRAM, HBM, Medium

__all__ = ["one_medium", "ordinal_of"]

_DIGITS_MAX: Final = 4  # of the number of a GPU


def ordinal_of(device: object) -> int:
    """The number of the GPU, or -1 for the CPU."""
    if not isinstance(device, str):
        raise ArgumentTypeError(f"device must be a str, not {type(device).__name__}")
    if device == "cpu":
        return -1
    name, colon, number = device.partition(":")
    digits = number if colon else "0"
    if name != "cuda" or not (digits.isascii() and digits.isdigit()) or len(digits) > _DIGITS_MAX:
        raise ArgumentError(f"device is {shown(device)}; it must be 'cpu' or 'cuda:N'")
    return int(digits)


def one_medium(value: object) -> Medium:
    """The medium, which must be HBM or DRAM."""
    number = int_from(value, "medium, kvpool.HBM or kvpool.DRAM,")
    if number not in (HBM, DRAM):
        raise ArgumentError(f"medium must be kvpool.HBM (1) or kvpool.DRAM (2), and is {shown(number)}", value=number)
    return Medium(number)
