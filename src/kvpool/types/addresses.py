"""Addresses of blocks, taken apart.

An address is 64 bits, and names one block until the block is freed (cpp/kvpool/base/address.h):

    63        50 49  47 46              24 23               0
    +-----------+------+------------------+------------------+
    | instance  |medium|    generation    |      block       |
    |  14 bits  |3 bits|     23 bits      |     24 bits      |
    +-----------+------+------------------+------------------+
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpool.arguments import int_from, shown
from kvpool.errors import ArgumentError, ArgumentTypeError, NotOwner
from kvpool.types.medium import Medium

__all__ = ["Address", "AddressLike", "checked_block_ids", "decode_address", "instances", "media", "with_instance"]

_BLOCK_BITS: Final = 24
_ADDRESSES_MAX: Final = 1 << 28  # in one call; an array can claim any number, with a stride of 0
_GENERATION_BITS: Final = 23
_MEDIUM_BITS: Final = 3
_GENERATION_SHIFT: Final = _BLOCK_BITS
_MEDIUM_SHIFT: Final = _GENERATION_SHIFT + _GENERATION_BITS
_INSTANCE_SHIFT: Final = _MEDIUM_SHIFT + _MEDIUM_BITS
_MEDIUM_MASK: Final = (1 << _MEDIUM_BITS) - 1
_BLOCK_MASK: Final = np.uint64((1 << _BLOCK_BITS) - 1)

AddressLike: TypeAlias = npt.NDArray[np.uint64] | Sequence[int]


class Address(NamedTuple):
    """The four parts of an address.

    Attributes:
        instance: The instance that owns the block; 0 is the pool at hand, before it joins a cluster.
        medium: HBM, DRAM or DISK.
        generation: Grows by one whenever the block is freed: an address of an older generation is stale.
        block: Number of the block within its medium.
    """

    instance: int
    medium: Medium
    generation: int
    block: int


def decode_address(address: int | np.unsignedinteger[Any]) -> Address:
    """Takes one address apart.

    Raises:
        ArgumentError: It is negative, has more than 64 bits, or names no medium.
        ArgumentTypeError: It is not an int.
    """
    number = int_from(address, "an address")
    if not 0 <= number < 1 << 64:
        raise ArgumentError(f"address {shown(number)} does not fit 64 unsigned bits", address=number)
    medium = number >> _MEDIUM_SHIFT & (1 << _MEDIUM_BITS) - 1
    if not 1 <= medium <= len(Medium):
        raise ArgumentError(f"address {number:#x} names no medium: its medium bits are {medium}", address=number)
    return Address(
        instance=number >> _INSTANCE_SHIFT,
        medium=Medium(medium),
        generation=number >> _GENERATION_SHIFT & (1 << _GENERATION_BITS) - 1,
        block=number & (1 << _BLOCK_BITS) - 1,
    )


def instances(addresses: AddressLike) -> npt.NDArray[np.int64]:
    """The instance of each address, as int64: 0 is the pool at hand, before it joined a cluster.

    Raises:
        ArgumentError: A number cannot be an address.
        ArgumentTypeError: Not an array of unsigned integers or a sequence of ints.
    """
    array_ = _address_array(addresses)
    _media_checked(array_)
    return (array_ >> np.uint64(_INSTANCE_SHIFT)).astype(np.int64)


def with_instance(addresses: AddressLike, instance: int) -> npt.NDArray[np.uint64]:
    """Addresses of one pool with its instance, also those that it gave out before it had one.

    Raises:
        NotOwner: An address is of another instance.
        ArgumentError: A number cannot be an address.
        ArgumentTypeError: Not an array of unsigned integers or a sequence of ints.
    """
    array_ = _address_array(addresses)
    _media_checked(array_)
    named = array_ >> np.uint64(_INSTANCE_SHIFT)
    others = (named != 0) & (named != instance)
    if others.any():
        at = int(others.argmax())
        raise NotOwner(
            f"address {int(array_[at])} (position {at}) is of instance {int(named[at])}, and this pool is {instance}",
            address=int(array_[at]),
            position=at,
            instance=int(named[at]),
        )
    return array_ | np.uint64(instance << _INSTANCE_SHIFT)


def checked_block_ids(addresses: AddressLike) -> npt.NDArray[np.int64]:
    """As `kvpool.block_ids`, which calls it for all but the usual lists: addresses of several media, or wrong ones.

    Raises:
        ArgumentError: A number cannot be an address; or the addresses are of several instances.
        ArgumentTypeError: Not an array of unsigned integers or a sequence of ints.
    """
    array_ = _address_array(addresses)
    _media_checked(array_)
    _check_one_instance(array_)
    return (array_ & _BLOCK_MASK).astype(np.int64)


def media(addresses: AddressLike) -> npt.NDArray[np.uint8]:
    """The medium of each address, as uint8: compare with `kvpool.HBM` and `kvpool.DRAM`.

    Raises:
        ArgumentError: A number cannot be an address.
        ArgumentTypeError: Not an array of unsigned integers or a sequence of ints.
    """
    return _media_checked(_address_array(addresses))


def _address_array(addresses: AddressLike) -> npt.NDArray[np.uint64]:
    """A copy, because another thread may write the array between the check and the use."""
    if isinstance(addresses, np.ndarray):
        if addresses.dtype == np.uint64:
            if addresses.size > _ADDRESSES_MAX:
                raise ArgumentError(
                    f"there are {addresses.size} addresses, and may be {_ADDRESSES_MAX}",
                    given=addresses.size,
                    maximum=_ADDRESSES_MAX,
                )
            return np.array(addresses)
        # Not converted: a signed or floating-point array has already lost what tells an address from another.
        raise ArgumentTypeError(f"addresses must be uint64, not {addresses.dtype} (shape {addresses.shape})")
    if isinstance(addresses, (str, bytes, bytearray)) or not isinstance(addresses, (Sequence, array)):
        raise ArgumentTypeError(
            f"addresses must be a uint64 array or a sequence of ints, not {type(addresses).__name__}"
        )
    try:
        items = list(addresses)
    except Exception as error:
        raise ArgumentTypeError(f"addresses: {type(addresses).__name__} cannot be read: {shown(error)}") from error
    with contextlib.suppress(Exception):
        return np.array(array("Q", items), dtype=np.uint64)
    numbers = [int_from(item, f"addresses must be ints: addresses[{index}]") for index, item in enumerate(items)]
    for index, number in enumerate(numbers):
        if not 0 <= number < 1 << 64:
            raise ArgumentError(
                f"addresses[{index}] is {shown(number)}, which does not fit 64 unsigned bits",
                address=number,
                position=index,
            )
    return np.array(array("Q", numbers), dtype=np.uint64)


def _check_one_instance(addresses: npt.NDArray[np.uint64]) -> None:
    instances = addresses >> np.uint64(_INSTANCE_SHIFT)
    known = instances[instances != 0]
    if known.size and (known != known[0]).any():
        other = int(known[known != known[0]][0])
        raise ArgumentError(
            f"the addresses belong to instances {int(known[0])} and {other}: no tensor has blocks of both",
            instance=other,
        )


def _media_checked(addresses: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint8]:
    found = (addresses >> np.uint64(_MEDIUM_SHIFT)).astype(np.uint8) & np.uint8((1 << _MEDIUM_BITS) - 1)
    wrong = (found == 0) | (found > len(Medium))
    if wrong.any():
        index = int(wrong.argmax())
        number = int(addresses.reshape(-1)[index])
        raise ArgumentError(
            f"addresses[{index}] ({number:#x}) names no medium: its medium bits are {int(found.reshape(-1)[index])}",
            address=number,
            position=index,
        )
    return found
