"""The types of what the verbs of a pool take: vectors, streams and the words that choose how."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpool.types.medium import Medium

__all__ = [
    "AddressVector",
    "Bytes",
    "CudaStream",
    "Keys",
    "MediumChoice",
    "OneMedium",
    "Policy",
    "Priority",
    "Route",
    "Strategy",
    "TokenVector",
]

# int32 or int64; bytes are taken as int32 in the machine's order.
TokenVector: TypeAlias = (
    "npt.NDArray[np.int32] | npt.NDArray[np.int64] | Sequence[int] | array[int] | bytes | bytearray | memoryview"
)
# An int (a cudaStream_t), or an object that has one: `__cuda_stream__()`, torch's `.cuda_stream`, CuPy's `.ptr`.
CudaStream: TypeAlias = "int | object"
# Keys of blocks: bytes, or str in hex digits; or all in one buffer, an array of shape [n, key_bytes] or bytes in a row.
Keys: TypeAlias = (
    "list[bytes] | list[str] | tuple[bytes | str, ...] | npt.NDArray[np.uint8] | bytes | bytearray | memoryview"
)
# kvpool.HBM or kvpool.DRAM, by name or number.
OneMedium: TypeAlias = Medium | Literal[1, 2]
# The same, or kvpool.MIXED.
MediumChoice: TypeAlias = Medium | Literal[1, 2, 8]
Policy: TypeAlias = Literal["lru", "lfu", "fifo"]
Strategy: TypeAlias = Literal["auto", "by_layer", "by_layer_agg", "by_request", "by_request_agg"]
Priority: TypeAlias = Literal["decode", "prefill", "background"]
Route: TypeAlias = Literal["loopback", "shm", "cuda_ipc", "cma", "sock", "ucx", "nccl"]
AddressVector: TypeAlias = "npt.NDArray[np.uint64] | npt.NDArray[np.int64] | Sequence[int] | array[int] | memoryview"
Bytes: TypeAlias = bytes | bytearray | memoryview
