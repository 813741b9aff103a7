"""Media, layouts and addresses: the basic types of kvpool.

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
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpool.arguments import int_from, shown
from kvpool.errors import ArgumentError, ArgumentTypeError

__all__ = [
    "DISK",
    "DRAM",
    "DTYPES",
    "HBM",
    "MIXED",
    "Address",
    "AddressLike",
    "KVLayout",
    "Layout",
    "Medium",
    "Policy",
    "Priority",
    "RawLayout",
    "Route",
    "Strategy",
    "block_ids",
    "decode_address",
    "media",
]


class Medium(IntEnum):
    """A kind of memory for blocks. No pool has blocks on `DISK` yet: asking for them raises `Unsupported`."""

    HBM = 1
    DRAM = 2
    DISK = 3


HBM: Final = Medium.HBM
DRAM: Final = Medium.DRAM
DISK: Final = Medium.DISK
MIXED: Final = 8
"""Where a verb takes a medium to place blocks in: HBM first, the rest DRAM. No medium, so no address has it."""


# ---- layouts --------------------------------------------------------------------------------------------------------


class DType(NamedTuple):
    """An element type: its size, and the NumPy type of a view, which differs if NumPy has no such type."""

    itemsize: int
    numpy: str


DTYPES: Final[dict[str, DType]] = {
    "float32": DType(4, "float32"),
    "float16": DType(2, "float16"),
    "bfloat16": DType(2, "uint16"),
    "float8_e4m3fn": DType(1, "uint8"),
    "float8_e5m2": DType(1, "uint8"),
    "int8": DType(1, "int8"),
    "uint8": DType(1, "uint8"),
}

_DIMENSION_MAX: Final = 1 << 20  # of one number of a layout; far above any model, far below an overflow
_BLOCK_BYTES_MAX: Final = 1 << 40


def _count(owner: str, name: str, value: object, maximum: int = _DIMENSION_MAX) -> int:
    """The value as an int in [1, maximum]; accepts what Python accepts as an index, except bool."""
    number = int_from(value, f"{owner}: {name}")
    if not 1 <= number <= maximum:
        raise ArgumentError(
            f"{owner}: {name} is {shown(number)}; it must be from 1 to {maximum}", value=number, maximum=maximum
        )
    return number


def _choice(owner: str, name: str, value: object, choices: Sequence[str]) -> None:
    if not isinstance(value, str):
        raise ArgumentTypeError(f"{owner}: {name} must be a str, not {type(value).__name__} ({shown(value)})")
    if value not in choices:
        raise ArgumentError(f"{owner}: {name} is {shown(value)}; it must be one of {', '.join(choices)}")


def _block_bytes_checked(owner: str, block_bytes: int) -> None:
    if block_bytes > _BLOCK_BYTES_MAX:
        raise ArgumentError(
            f"{owner}: a block would have {block_bytes} bytes; at most {_BLOCK_BYTES_MAX} are possible",
            block_bytes=block_bytes,
            maximum=_BLOCK_BYTES_MAX,
        )


@dataclass(frozen=True)
class KVLayout:
    """The shape of a block of keys and values: `block_tokens` tokens, all layers, K and V.

    Within a block the order is [layer, k/v, head, token, dim], or [layer, k/v, token, head, dim]: a layer's K (or V) is
    one piece. If an engine keeps K and V of a token side by side, declare ``pages="fused"``: then a layer is one piece,
    [head, token, 2 * dim] or [token, head, 2 * dim]. Peers whose layouts differ in anything but `order` are refused,
    because blocks of the same size may differ in content.

    Attributes:
        layers: Number of layers.
        kv_heads: Heads of K and of V in each layer.
        head_dim: Elements of a head.
        dtype: One of `kvpool.types.DTYPES`.
        block_tokens: Tokens in a block.
        order: "aggregated": a block is one run of bytes. "discrete": a block is as many runs as it has pieces, in
            separate tensors, as engines keep them.
        dims: "HND": heads before tokens, so a range of heads of a piece is contiguous, and one strip for ranks that
            divide heads differently. "NHD": tokens before heads, the default of vLLM and FlashInfer; then such a strip
            has one token.
        pages: "split": K and V of a layer are two pieces. "fused": they are one piece, each row of which holds K and
            then V of a token of a head, as in vLLM on the CPU. Latent attention (MLA) is one head of
            ``head_dim = latent / 2``, fused.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    block_tokens: int = 16
    order: Literal["aggregated", "discrete"] = "aggregated"
    dims: Literal["HND", "NHD"] = "HND"
    pages: Literal["split", "fused"] = "split"

    def __post_init__(self) -> None:
        """Checks every number.

        Raises:
            ArgumentError: A number or name is out of range.
            ArgumentTypeError: A value has the wrong type.
        """
        for name in ("layers", "kv_heads", "head_dim", "block_tokens"):
            object.__setattr__(self, name, _count("KVLayout", name, getattr(self, name)))
        _choice("KVLayout", "dtype", self.dtype, tuple(DTYPES))
        _choice("KVLayout", "order", self.order, ("aggregated", "discrete"))
        _choice("KVLayout", "dims", self.dims, ("HND", "NHD"))
        _choice("KVLayout", "pages", self.pages, ("split", "fused"))
        _block_bytes_checked("KVLayout", self.block_bytes)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token: K and V of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.token_bytes * self.block_tokens

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype].itemsize

    @property
    def piece_bytes(self) -> tuple[int, ...]:
        """Bytes of each piece of a block: layer 0 K, layer 0 V, layer 1 K, ...; when fused, layer 0, layer 1, ..."""
        pieces = self.layers if self.pages == "fused" else 2 * self.layers
        return (self.block_bytes // pieces,) * pieces

    @property
    def segment_bytes(self) -> tuple[int, ...]:
        """Bytes of each separate run of a block: one when aggregated, the pieces when discrete."""
        return (self.block_bytes,) if self.order == "aggregated" else self.piece_bytes

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one block: (layers, 2, kv_heads, block_tokens, head_dim); of NHD, tokens before heads.

        When fused it is (layers, kv_heads, block_tokens, 2 * head_dim), likewise.
        """
        inner = (self.kv_heads, self.block_tokens) if self.dims == "HND" else (self.block_tokens, self.kv_heads)
        if self.pages == "fused":
            return (self.layers, *inner, 2 * self.head_dim)
        return (self.layers, 2, *inner, self.head_dim)

    @property
    def _numbers(self) -> tuple[int, int, int, str, int, bool, bool]:
        """As the core takes them."""
        return (
            self.layers,
            self.kv_heads,
            self.head_dim,
            self.dtype,
            self.block_tokens,
            self.dims == "NHD",
            self.pages == "fused",
        )

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype of a NumPy view: uint16 for bfloat16 and uint8 for float8, which NumPy does not have."""
        return np.dtype(DTYPES[self.dtype].numpy)


@dataclass(frozen=True)
class RawLayout:
    """The shape of a block with other content than keys and values: a number of bytes for a number of tokens.

    It has the attributes of `KVLayout` as far as they make sense, so code that moves blocks can treat both alike.

    Attributes:
        block_bytes: Bytes of one block.
        block_tokens: Tokens that a block stands for.
    """

    block_bytes: int
    block_tokens: int = 16

    def __post_init__(self) -> None:
        """Checks both numbers.

        Raises:
            ArgumentError: A number is out of range.
            ArgumentTypeError: A value is not an int.
        """
        object.__setattr__(self, "block_bytes", _count("RawLayout", "block_bytes", self.block_bytes, _BLOCK_BYTES_MAX))
        object.__setattr__(self, "block_tokens", _count("RawLayout", "block_tokens", self.block_tokens))

    @property
    def dtype(self) -> str:
        """Always "uint8"."""
        return "uint8"

    @property
    def itemsize(self) -> int:
        """Always 1."""
        return 1

    @property
    def piece_bytes(self) -> tuple[int, ...]:
        """One piece: the block."""
        return (self.block_bytes,)

    @property
    def segment_bytes(self) -> tuple[int, ...]:
        """One run: the block."""
        return (self.block_bytes,)

    @property
    def shape(self) -> tuple[int]:
        """Shape of one block: (block_bytes,)."""
        return (self.block_bytes,)

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype of a NumPy view."""
        return np.dtype(np.uint8)


Layout: TypeAlias = KVLayout | RawLayout


# ---- addresses ------------------------------------------------------------------------------------------------------

_BLOCK_BITS: Final = 24
_ADDRESSES_MAX: Final = 1 << 28  # in one call; an array can claim any number, with a stride of 0
_GENERATION_BITS: Final = 23
_MEDIUM_BITS: Final = 3
_GENERATION_SHIFT: Final = _BLOCK_BITS
_MEDIUM_SHIFT: Final = _GENERATION_SHIFT + _GENERATION_BITS
_INSTANCE_SHIFT: Final = _MEDIUM_SHIFT + _MEDIUM_BITS

AddressLike: TypeAlias = npt.NDArray[np.uint64] | Sequence[int]

# What the verbs of a pool take. Tokens: int32 or int64; bytes are taken as int32 in the machine's order.
TokenVector: TypeAlias = (
    "npt.NDArray[np.int32] | npt.NDArray[np.int64] | Sequence[int] | array[int] | bytes | bytearray | memoryview"
)
# An int (a cudaStream_t), or an object that has one: `__cuda_stream__()`, torch's `.cuda_stream`, CuPy's `.ptr`.
CudaStream: TypeAlias = "int | object"
Policy: TypeAlias = Literal["lru", "lfu", "fifo"]
Strategy: TypeAlias = Literal["auto", "by_layer", "by_layer_agg", "by_request", "by_request_agg"]
Priority: TypeAlias = Literal["decode", "prefill", "background"]
Route: TypeAlias = Literal["loopback", "shm", "cuda_ipc", "cma", "sock", "ucx", "nccl"]
AddressVector: TypeAlias = "npt.NDArray[np.uint64] | npt.NDArray[np.int64] | Sequence[int] | array[int] | memoryview"
Bytes: TypeAlias = bytes | bytearray | memoryview


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


def block_ids(addresses: AddressLike) -> npt.NDArray[np.int64]:
    """The block number of each address within its medium, as int64, ready to index a tensor: `kv[block_ids(addrs)]`.

    It is the number in the pool to which the address belongs; a borrowed block is not in the borrower's tensor. The
    function does not know the tensor's pool, so it refuses only lists with addresses of several pools. A pool's own
    addresses may have instance 0, from before it had peers, and its instance.

    Raises:
        ArgumentError: A number cannot be an address; or the addresses are of several instances.
        ArgumentTypeError: Not an array of unsigned integers or a sequence of ints.
    """
    array_ = _address_array(addresses)
    _media_checked(array_)
    instances = array_ >> np.uint64(_INSTANCE_SHIFT)
    known = instances[instances != 0]
    if known.size and (known != known[0]).any():
        other = int(known[known != known[0]][0])
        raise ArgumentError(
            f"the addresses belong to instances {int(known[0])} and {other}: no tensor has blocks of both",
            instance=other,
        )
    return (array_ & np.uint64((1 << _BLOCK_BITS) - 1)).astype(np.int64)


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


# ---- transfers ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TransferStats:
    """The cost of one transfer. Times in microseconds.

    Attributes:
        route: The route of the bytes; "" if there were no bytes to send.
        strategy: How blocks were cut into calls; for "auto", the strategy that was used.
        blocks: Blocks of the request.
        skipped_blocks: Of these, the prefix that the receiver had cached.
        calls: Pieces handed to the network, or copied.
        runs: Runs of blocks that are neighbours on both sides: the least possible number of calls for whole blocks.
        bytes: Bytes written.
        reserve_us: Until the receiver had blocks for it.
        write_us: Writing.
        complete_us: From the last byte to the receiver's answer.
        total_us: In all.

    A fetch is written by the owner, which alone knows the cost of that: ``route`` is "fetch", ``calls``, ``reserve_us``
    and ``complete_us`` are 0, and ``write_us`` is the time from the request to the owner's answer.
    """

    route: str
    strategy: str
    blocks: int
    skipped_blocks: int
    calls: int
    runs: int
    bytes: int
    reserve_us: float
    write_us: float
    complete_us: float
    total_us: float


@dataclass(frozen=True)
class TransferTotals:
    """The ended transfers of one kind that a pool has begun.

    Attributes:
        succeeded: How many succeeded.
        failed: How many ended with an error, by the name of its class; without zeros.
        bytes: Bytes written or read by all of them, without failed fetches, for which it is unknown.
        seconds: The total time of the successful ones.
        durations: A histogram of the times of the successful ones: pairs of an upper bound in seconds, ascending, and a
            number; the last bound is infinite.
    """

    succeeded: int
    failed: dict[str, int]
    bytes: int
    seconds: float
    durations: tuple[tuple[float, int], ...]


@dataclass(frozen=True, eq=False)
class TransferSpec:
    """One transfer of `Batch.transfer`. The fields are the arguments of `Pool.transfer`, which explains them.

    Attributes:
        tokens: Insert the blocks at the receiver as this prompt, as `Pool.transfer_with_insert` does.
        namespace: Of the prompt.
    """

    peer: str
    addrs: AddressVector
    tokens: TokenVector | None = None
    namespace: str = ""
    to: AddressVector | None = None
    medium: int = HBM
    evict: bool = True
    private: Bytes | None = None
    strategy: Strategy = "auto"
    priority: Priority = "prefill"
    route: Route | None = None
    checksum: bool = False
    stream: object = None
    timeout: float | None = None
