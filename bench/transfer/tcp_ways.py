"""Plain TCP: N pieces gathered into one message, or piece by piece (tcp_ways.cpp)."""

from __future__ import annotations

import ctypes
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.transfer.build import build
from bench.transfer.side import Side, buffer, region, scattered

_NUMBER = ctypes.c_uint64


class Subject(Side):
    """See bench/transfer/side.py. Sender and receiver."""

    def __init__(self) -> None:
        self._library = build(Path(__file__).with_name("tcp_ways.cpp"), "-pthread")
        self._library.serve_tcp.restype = _NUMBER
        self._socket = -1

    def version(self) -> str:
        return "plain TCP"

    def receive(self, count: int, size: int) -> dict[str, Any]:
        pointer = self._make(count, size, scattered(count, 2))
        port = self._library.serve_tcp(pointer, _NUMBER(count), _NUMBER(size))
        if not port:
            raise RuntimeError("no port to listen on")
        return {"port": port}

    def send(self, count: int, size: int, target: dict[str, Any]) -> list[int]:
        self._order = scattered(count, 1)
        pointer = self._make(count, size, self._order)
        self._socket = self._library.connect_tcp(_NUMBER(target["port"]))
        if self._socket < 0:
            raise RuntimeError("the receiver does not answer")
        arguments = (ctypes.c_int(self._socket), pointer, _NUMBER(count), _NUMBER(size))
        self._calls = {
            "gathered": partial(_checked, self._library.send_gathered, *arguments),
            "pieces": partial(_checked, self._library.send_pieces, *arguments),
        }
        return [int(slot) for slot in scattered(count, 2)]

    def end(self) -> None:
        if self._socket >= 0:
            self._library.close_tcp(ctypes.c_int(self._socket))
        self._socket = -1
        self._calls = {}
        del self._region, self._memory

    def _make(self, count: int, size: int, order: Any) -> Any:
        self._memory = buffer(2 * count * size)
        self._region = region(self._memory, size)
        self._places = np.asarray(order * size, np.uint64) + np.uint64(self._memory.ctypes.data)
        return ctypes.c_void_p(self._places.ctypes.data)


def _checked(function: Any, *arguments: Any) -> None:
    if function(*arguments) != 0:
        raise RuntimeError("the connection ended")
