"""A relay between two pools that does not know their secret: it passes their handshake on, and then forges content."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

__all__ = ["Relay"]

_HEADER = struct.Struct("<IBBHQQII")  # body bytes, kind, flags, verb, sequence, id, payload bytes, lifetime
_TAG_BYTES = 16
_END_BYTES = 1  # behind a payload
_DATA = 22
_HELLO_BYTES, _PROOF_BYTES = 44, 32


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return table


_TABLE = _crc_table()


def checksum_tag(frame: bytes) -> bytes:
    """The tag of a frame if both sides trust the network, which anyone can compute."""
    crc = 0xFFFFFFFF
    for byte in frame:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    return struct.pack("<I", crc ^ 0xFFFFFFFF) + bytes(_TAG_BYTES - 4)


class Relay:
    """Listens at `address`, and forwards frames to and from the pool that listens at the TCP address given.

    Of each data frame that goes to the pool it flips the bits of the payload, and computes the tag anew as a checksum.

    Attributes:
        forged: Data frames that were changed.
        checksums: Frames that came with a checksum for their first tag.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("tcp:").rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp:127.0.0.1:{self._listener.getsockname()[1]}"
        self.forged = 0
        self.checksums = 0
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        for end in (self._listener, *self._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(60)
        for end in (self._listener, *self._ends):
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self._ends += [client, server]
                with contextlib.suppress(EOFError, OSError):
                    for source, sink, count in (
                        (client, server, _HELLO_BYTES), (server, client, _HELLO_BYTES), (client, server, _PROOF_BYTES),
                        (server, client, 1 + _PROOF_BYTES),
                    ):  # fmt: skip
                        sink.sendall(_take(source, count))
                    for source, sink in ((client, server), (server, client)):
                        thread = threading.Thread(
                            target=self._forward, args=(source, sink, sink is server), daemon=True
                        )
                        self._threads.append(thread)
                        thread.start()

    def _forward(self, source: socket.socket, sink: socket.socket, forges: bool) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                header = _take(source, _HEADER.size)
                body_bytes, kind, *_, payload_bytes, _ = _HEADER.unpack(header)
                head, tag = header + _take(source, body_bytes), _take(source, _TAG_BYTES)
                self.checksums += tag[4:] == bytes(_TAG_BYTES - 4)
                frame = head + tag
                if kind == _DATA:
                    content, tag = _take(source, payload_bytes + _END_BYTES), _take(source, _TAG_BYTES)
                    if forges:
                        payload, end = content[:payload_bytes], content[payload_bytes:]
                        content = bytes(byte ^ 0xFF for byte in payload) + end
                        tag = checksum_tag(head + content)
                        self.forged += 1
                    frame += content + tag
                sink.sendall(frame)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _take(source: socket.socket, count: int) -> bytes:
    taken = b""
    while len(taken) < count:
        piece = source.recv(count - len(taken))
        if not piece:
            raise EOFError
        taken += piece
    return taken
