"""Sizes in bytes, and the unit of a space."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, Literal

from kvpool.arguments import int_from, shown
from kvpool.errors import ArgumentError, ArgumentTypeError
from kvpool.types import KVLayout, RawLayout

__all__ = [
    "UNITS_MAX",
    "UNIT_MAX",
    "UNIT_MIN",
    "Pieces",
    "bytes_from",
    "padding",
    "pieces_of",
    "unit_for",
    "unit_from",
    "units_of",
]

Pieces = Literal["whole", "layer"]

UNIT_MIN: Final = 4 << 10
UNIT_MAX: Final = 64 << 10
UNITS_MAX: Final = 1 << 24  # of a tier: a block's number is its first unit, and an address has 24 bits for it
_WASTE_WANTED: Final = 0.01
_SUFFIXES: Final = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE: Final = re.compile(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*(KiB|MiB|GiB|TiB|)\s*", re.ASCII)
_BYTES_MAX: Final = 1 << 60


def bytes_from(value: object, what: str) -> int:
    """A number of bytes: an int from 0, or a str such as "8GiB", "1.5 MiB" or "4096".

    Raises:
        ArgumentError: It is negative, too large, no whole number of bytes, or no such text.
        ArgumentTypeError: It is neither an int nor a str.
    """
    if not isinstance(value, str):
        number: int = int_from(value, f"{what}, in bytes or as text such as '8GiB',")
        if not 0 <= number <= _BYTES_MAX:
            raise ArgumentError(f"{what} is {shown(number)} bytes; it must be from 0 to 2**60")
        return number
    found = _SIZE.fullmatch(value)
    if found is None:
        raise ArgumentError(f"{what} is {shown(value)}; a size is a number, with KiB, MiB, GiB or TiB or in bytes")
    whole, _, part = found[1].partition(".")
    scale = _SUFFIXES[found[2]]
    bytes_of_part, rest = divmod(int(part or "0") * scale, 10 ** len(part))
    if rest:
        raise ArgumentError(f"{what} is {shown(value)}, which is no whole number of bytes")
    size: int = int(whole) * scale + bytes_of_part
    if size > _BYTES_MAX:
        raise ArgumentError(f"{what} is {shown(value)}; it must be at most 2**60 bytes")
    return size


def units_of(layout: KVLayout | RawLayout, unit: int) -> int:
    """How many units of `unit` bytes a block has."""
    return -(-layout.block_bytes // unit)


def padding(layout: KVLayout | RawLayout, unit: int) -> float:
    """The part of a block's units that its bytes leave empty: 0 or more, below 1."""
    return 1 - layout.block_bytes / (units_of(layout, unit) * unit)


def unit_for(layouts: Sequence[KVLayout | RawLayout], size: int, pieces: Pieces = "whole") -> int:
    """The largest unit that wastes at most 1 % of every layout's blocks; the smallest there is if none does.

    With pieces="layer" a layer is whole units, too, where there are layers. It is larger if the largest tier, of `size`
    bytes, would have too many units.
    """
    unit = UNIT_MAX if layouts else UNIT_MIN
    layered = [layout for layout in layouts if isinstance(layout, KVLayout)] if pieces == "layer" else []
    while unit > UNIT_MIN and (
        any(padding(layout, unit) > _WASTE_WANTED for layout in layouts)
        or any(layout.block_bytes % (layout.layers * unit) for layout in layered)
    ):
        unit //= 2
    while unit < UNIT_MAX and size // unit > UNITS_MAX:
        unit *= 2
    return unit


def unit_from(value: object, layouts: Sequence[KVLayout | RawLayout], size: int, pieces: Pieces = "whole") -> int:
    """The unit that was asked for, "auto" or bytes; `size`: bytes of the largest tier; `pieces`: as for unit_for.

    Raises:
        ArgumentError: It is no power of two from 4 to 64 KiB, or `pieces` is another word.
        ArgumentTypeError: It is neither an int nor a str, or `layouts` has something else than layouts.
    """
    for layout in layouts:
        if not isinstance(layout, KVLayout | RawLayout):
            raise ArgumentTypeError(f"layouts must be KVLayouts or RawLayouts, not {type(layout).__name__}")
    _check_pieces(pieces)
    if value == "auto":
        return unit_for(layouts, size, pieces)
    unit = bytes_from(value, "unit")
    if not UNIT_MIN <= unit <= UNIT_MAX or unit & (unit - 1):
        raise ArgumentError(f"unit is {unit} bytes; it must be a power of two from {UNIT_MIN} to {UNIT_MAX}")
    return unit


def pieces_of(layout: KVLayout | RawLayout, unit: int, pieces: Pieces) -> int:
    """Into how many pieces of whole units a block may be cut: 1, or its layers.

    Raises:
        ArgumentError: `pieces` is another word, the layout has no layers, or a layer is no whole number of units.
    """
    _check_pieces(pieces)
    if pieces == "whole":
        return 1
    if isinstance(layout, RawLayout):
        raise ArgumentError("raw blocks have no layers, so they cannot be cut into pieces: use pieces='whole'")
    layer = layout.block_bytes // layout.layers
    if layer * layout.layers != layout.block_bytes or layer % unit:
        raise ArgumentError(
            f"a layer of a block has {layer} bytes, which are no whole number of units of {unit} bytes: make the unit "
            "smaller, or use pieces='whole'"
        )
    return layout.layers


def _check_pieces(pieces: object) -> None:
    if not isinstance(pieces, str):
        raise ArgumentTypeError(f"pieces must be 'whole' or 'layer', not {type(pieces).__name__}")
    if pieces not in ("whole", "layer"):
        raise ArgumentError(f"pieces is {shown(pieces)}; it must be 'whole' or 'layer'")
