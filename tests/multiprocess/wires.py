"""A cable between the network namespaces of two victims, by system calls alone; it can be cut in each direction.

A direction is cut by a wrong address in the sender's neighbour table: what it sends is on the wire, and nobody takes
it. Neither side's kernel notices anything, as with a switch that has failed.
"""

from __future__ import annotations

import fcntl
import socket
import struct

__all__ = ["address_on_wire", "aim", "lay_wire", "take_end"]

_NAMES = (b"kvp0", b"kvp1")
_ADDRESSES = ("10.211.0.1", "10.211.0.2")
_RTM_NEWLINK = 16
_CREATE = 0x1 | 0x4 | 0x200 | 0x400  # request, acknowledge, exclusive, create
_IFLA_IFNAME, _IFLA_LINKINFO, _IFLA_NET_NS_PID = 3, 18, 19
_IFLA_INFO_KIND, _IFLA_INFO_DATA, _VETH_INFO_PEER = 1, 2, 1
_SIOCGIFHWADDR, _SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCSARP = 0x8927, 0x8914, 0x8916, 0x891C, 0x8955
_UP_AND_RUNNING = 0x41
_ATF_COMPLETE_AND_PERMANENT = 0x02 | 0x04
_NOBODY = b"\x02\x00\x00\x00\x00\x99"


def address_on_wire(end: int) -> str:
    return _ADDRESSES[end]


def lay_wire(pid_of_other_end: int) -> None:
    """Makes the pair of interfaces; the first stays in the caller's namespace."""
    info = struct.pack("BxHiII", 0, 0, 0, 0, 0)
    there = _attribute(_IFLA_NET_NS_PID, struct.pack("I", pid_of_other_end))
    other = info + _attribute(_IFLA_IFNAME, _NAMES[1]) + there
    kind = _attribute(_IFLA_INFO_KIND, b"veth") + _attribute(_IFLA_INFO_DATA, _attribute(_VETH_INFO_PEER, other))
    body = info + _attribute(_IFLA_IFNAME, _NAMES[0]) + _attribute(_IFLA_LINKINFO, kind)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
        kernel.bind((0, 0))
        kernel.send(struct.pack("IHHII", 16 + len(body), _RTM_NEWLINK, _CREATE, 1, 0) + body)
        (error,) = struct.unpack_from("i", kernel.recv(4096), 16)
    if error:
        raise OSError(-error, "the kernel makes no pair of interfaces")


def take_end(end: int) -> bytes:
    """Gives this namespace's end its address, and turns it on; returns its hardware address."""
    with socket.socket() as kernel:
        _set(kernel, b"lo", _SIOCSIFFLAGS, struct.pack("h", _UP_AND_RUNNING))
        _set(kernel, _NAMES[end], _SIOCSIFADDR, _inet(_ADDRESSES[end]))
        _set(kernel, _NAMES[end], _SIOCSIFNETMASK, _inet("255.255.255.0"))
        _set(kernel, _NAMES[end], _SIOCSIFFLAGS, struct.pack("h", _UP_AND_RUNNING))
        return _set(kernel, _NAMES[end], _SIOCGIFHWADDR, b"")[18:24]


def aim(end: int, hardware: bytes | None) -> None:
    """Where this end sends frames for the other one; None: nowhere."""
    link = struct.pack("H14s", 1, hardware or _NOBODY)
    request = _inet(_ADDRESSES[1 - end]) + link + struct.pack("i16s16s", _ATF_COMPLETE_AND_PERMANENT, b"", _NAMES[end])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as kernel:
        fcntl.ioctl(kernel, _SIOCSARP, request)


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def _inet(address: str) -> bytes:
    return struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(address))


def _set(kernel: socket.socket, name: bytes, request: int, value: bytes) -> bytes:
    return fcntl.ioctl(kernel, request, struct.pack("16s24s", name, value))
