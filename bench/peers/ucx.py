"""UCX itself, without a library over it: N puts and a flush, one call from Python (ucx_puts.cpp).

UCX_TLS chooses the transport. Shared memory of UCX ("posix") reaches only memory that UCX allocated.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import libucx  # type: ignore[import-not-found,import-untyped,unused-ignore]  # in its own environment only
import numpy as np
import numpy.typing as npt

from bench.transfer.build import build
from bench.transfer.side import AttendingSide, buffer, region, scattered

_TARGET_BYTES_MAX = 1 << 16
_NUMBER = ctypes.c_uint64


class Subject(AttendingSide):
    """See bench/transfer/side.py. Sender and receiver."""

    def __init__(self) -> None:
        super().__init__()
        self._library = _build()
        self._own = "posix" in os.environ.get("UCX_TLS", "")
        self._busy = os.environ.get("UCX_TLS") == "tcp"
        self._call("side_open")

    def version(self) -> str:
        return f"ucx {libucx.__version__}"

    def receive(self, count: int, size: int) -> dict[str, Any]:
        self._register(count, size)
        address, key = (ctypes.create_string_buffer(_TARGET_BYTES_MAX) for _ in range(2))
        lengths = [_NUMBER(_TARGET_BYTES_MAX) for _ in range(2)]
        self._call("side_metadata", address, ctypes.byref(lengths[0]), key, ctypes.byref(lengths[1]))
        if max(length.value for length in lengths) > _TARGET_BYTES_MAX:
            raise RuntimeError("UCX's address is too long")
        return {
            "address": address.raw[: lengths[0].value].hex(),
            "key": key.raw[: lengths[1].value].hex(),
            "base": self._base,
        }

    def send(self, count: int, size: int, target: dict[str, Any]) -> list[int]:
        self._register(count, size)
        self._call("side_meet", bytes.fromhex(target["address"]), bytes.fromhex(target["key"]))
        self._order = scattered(count, 1)
        slots = scattered(count, 2)
        self._here, self._there = (
            np.asarray(order * size, np.uint64) + np.uint64(base)
            for order, base in ((self._order, self._base), (slots, target["base"]))
        )
        pointers = [ctypes.c_void_p(addresses.ctypes.data) for addresses in (self._here, self._there)]
        numbers = (_NUMBER(count), _NUMBER(size))
        put = self._library.side_put

        def write() -> None:
            wrong = put(*pointers, *numbers)
            if wrong:
                raise RuntimeError(f"UCX says {wrong.decode()}")

        self._calls = {"puts": write}
        return [int(slot) for slot in slots]

    def end(self) -> None:
        self._calls = {}
        self._call("side_end")
        self._region = np.empty((0, 1), np.uint64)
        self._memory = np.empty(0, np.uint8)

    def _register(self, count: int, size: int) -> None:
        length = 2 * count * size
        self._memory = buffer(0 if self._own else length)
        mapped = _NUMBER()
        given = 0 if self._own else self._memory.ctypes.data
        self._call("side_map", _NUMBER(given), _NUMBER(length), ctypes.byref(mapped))
        self._base = mapped.value
        if self._own:
            self._memory = _at(self._base, length)
            self._memory[:] = 0
        self._region = region(self._memory, size)

    def progress(self) -> None:
        self._library.side_progress()

    def _call(self, name: str, *arguments: Any) -> None:
        wrong = getattr(self._library, name)(*arguments)
        if wrong:
            raise RuntimeError(f"{name}: UCX says {wrong.decode()}")


def _at(address: int, length: int) -> npt.NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address))


def _build() -> Any:
    root = Path(libucx.__file__).parent
    paths = (f"-I{root / 'include'}", f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}")
    library = build(Path(__file__).with_name("ucx_puts.cpp"), *paths, "-lucp", "-lucs")
    for name in ("side_open", "side_map", "side_metadata", "side_meet", "side_put", "side_end"):
        getattr(library, name).restype = ctypes.c_char_p
    return library
