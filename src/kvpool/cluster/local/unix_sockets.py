"""The names of Unix sockets in this network namespace, and the users that created them (sock_diag(7))."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from typing import Final

__all__ = ["socket_names"]

_NETLINK_SOCK_DIAG: Final = 4
_BY_FAMILY: Final = 20
_REQUEST_DUMP: Final = 0x301
_DONE: Final = 3
_ERROR: Final = 2
_SHOW_NAME_AND_UID: Final = 0x41
_NAME: Final = 0
_UID: Final = 7
_HEADER: Final = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_ASK: Final = struct.Struct("=BBHIIIII")  # family, protocol, -, states, inode, what to show, cookie
_FACTS: Final = struct.Struct("=BBBxIII")  # about a socket: family, type, state, inode, cookie
_ATTRIBUTE: Final = struct.Struct("=HH")  # length, type
_NUMBER: Final = struct.Struct("=I")
_TIMEOUT_S: Final = 5.0  # the kernel answers at once


def socket_names(prefix: bytes) -> Iterator[tuple[bytes, int]]:
    """The names with this prefix, each with the user id of the socket's creator. Abstract names start with a zero byte.

    Raises:
        OSError: The kernel does not tell: it is older than 5.3, or a sandbox.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(_TIMEOUT_S)
        every = 0xFFFFFFFF
        ask = _ASK.pack(socket.AF_UNIX, 0, 0, every, 0, _SHOW_NAME_AND_UID, every, every)
        kernel.send(_HEADER.pack(_HEADER.size + len(ask), _BY_FAMILY, _REQUEST_DUMP, 1, 0) + ask)
        while True:
            answer = kernel.recv(1 << 18)
            at = 0
            while at + _HEADER.size <= len(answer):
                length, kind, *_ = _HEADER.unpack_from(answer, at)
                if kind == _DONE:
                    return
                body = answer[at + _HEADER.size : at + length]
                if kind == _ERROR:
                    number = -struct.unpack_from("=i", body)[0]
                    raise OSError(number, os.strerror(number))
                if prefix in body:
                    name, uid = _attributes(body[_FACTS.size :])
                    if uid is None:
                        raise OSError(95, "this kernel does not report the owner of a socket")
                    if name.startswith(prefix):
                        yield name, uid
                at += (length + 3) & ~3


def _attributes(body: bytes) -> tuple[bytes, int | None]:
    name, uid = b"", None
    at = 0
    while at + _ATTRIBUTE.size <= len(body):
        length, kind = _ATTRIBUTE.unpack_from(body, at)
        value = body[at + _ATTRIBUTE.size : at + length]
        if kind == _NAME:
            name = value
        elif kind == _UID:
            uid = _NUMBER.unpack(value)[0]
        at += max((length + 3) & ~3, _ATTRIBUTE.size)
    return name, uid
