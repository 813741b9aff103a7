"""A man in the middle without the secret, who changes frames on their way and holds back their ends.

Bugs these tests are there to find: bytes that are placed before it is known who has written them (1).
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import kvpool

SECRET = "s" * 40
BLOCK_BYTES = 64 << 10
HEADER = struct.Struct("<IBBHQQII")
TAG_BYTES = 16
DATA = 22
LEASE_SECONDS = 10.0


def receive(source: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        if not (more := source.recv(length - len(data))):
            raise EOFError
        data += more
    return bytes(data)


class Middle:
    """Understands frames, as described in docs/wire.md. `change` gets header, body and payload of each data
    frame, and returns what goes on in their place: body, payload, and whether the rest of the frame follows."""

    def __init__(self, address: str) -> None:
        self._target = int(address.rpartition(":")[2])
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp:127.0.0.1:{self._listener.getsockname()[1]}"
        self.change: Callable[[bytes, bytes], tuple[bytes, bytes, bool]] | None = None
        self.changed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        near, _ = self._listener.accept()
        with near, socket.create_connection(("127.0.0.1", self._target)) as far:
            far.sendall(receive(near, 44))
            near.sendall(receive(far, 44))
            far.sendall(receive(near, 32))
            near.sendall(receive(far, 33))
            down = threading.Thread(target=self._pass_on, args=(far, near), daemon=True)
            down.start()
            with contextlib.suppress(EOFError, OSError):
                while True:
                    self._pass_frame(near, far)
            self._end(near, far)
            down.join()

    def _pass_frame(self, source: socket.socket, target: socket.socket) -> None:
        header = receive(source, HEADER.size)
        body_bytes, kind, *_, payload_bytes, _ = HEADER.unpack(header)
        body, tag, payload = receive(source, body_bytes), receive(source, TAG_BYTES), receive(source, payload_bytes)
        rest = receive(source, 1 + TAG_BYTES) if payload else b""
        if kind == DATA and self.change is not None:
            body, payload, follows = self.change(body, payload)
            rest = rest if follows else b""
            self.change = None
            target.sendall(header + body + tag + payload + rest)
            return self.changed.set()
        return target.sendall(header + body + tag + payload + rest)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        self._end(source, target)

    @staticmethod
    def _end(*ends: socket.socket) -> None:
        for one in ends:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """After the pools."""
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._listener.close()


@contextlib.contextmanager
def pools_and_middle() -> Iterator[tuple[kvpool.Pool, kvpool.Pool, Middle, str]]:
    layout = kvpool.RawLayout(block_bytes=BLOCK_BYTES, block_tokens=16)
    options = {"secret": SECRET, "prefer_unix_socket": False, "lease_s": LEASE_SECONDS, "routes": ("sock",)}
    with (
        kvpool.Pool(layout, hbm_blocks=16, name="receiver", **options) as receiver,
        kvpool.Pool(layout, hbm_blocks=16, name="sender", **options) as sender,
    ):
        middle = Middle(receiver.peers.listen("tcp:127.0.0.1:0"))
        peer = sender.peers.connect(middle.address, timeout=60)
        yield receiver, sender, middle, peer
        sender.close()
        receiver.close()
        middle.close()


def content(pool: kvpool.Pool) -> np.ndarray:
    return pool.tensor().numpy().reshape(-1, BLOCK_BYTES)


def address_at(body: bytes) -> int:
    """Where the first block's address stands in the body of a data frame."""
    (ranges,) = struct.unpack_from("<I", body)
    return 4 + 16 * ranges + 4


@pytest.mark.parametrize("follows", [True, False])
@pytest.mark.parametrize("what", ["another block", "the payload"])
def test_an_item_that_was_delivered_does_not_change(what, follows):
    with pools_and_middle() as (receiver, sender, middle, peer):
        lent = sender.alloc(2, instance=peer)
        mine = sender.alloc(1)
        (block,) = kvpool.block_ids(mine)
        content(sender)[block] = 0x11
        sender.transfer(peer, mine, to=lent[:1], private=b"", timeout=60).wait()
        content(sender)[block] = 0x22
        sender.transfer(peer, mine, timeout=60).wait()
        items = [receiver.inbox.receive(60), receiver.inbox.receive(60)]
        # Every block that was delivered, and the one that is to be written.
        before = [content(receiver)[kvpool.block_ids(item.addrs)].copy() for item in items]
        assert [int(one[0, 0]) for one in before] == [0x11, 0x22]
        (untold,) = kvpool.block_ids(lent[1:])

        def change(body: bytes, payload: bytes) -> tuple[bytes, bytes, bool]:
            at = address_at(body)
            if what == "another block":
                body = body[:at] + struct.pack("<Q", int(lent[0])) + body[at + 8 :]
            return body, b"\xee" * len(payload), follows

        middle.change = change
        handle = sender.transfer(peer, mine, to=lent[1:], private=b"", timeout=600)
        assert middle.changed.wait(60)
        if not follows:  # the receiver waits for the rest
            handle.cancel()
        with pytest.raises(kvpool.Error):
            handle.wait(60)
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            for item, bytes_before in zip(items, before, strict=True):
                assert (content(receiver)[kvpool.block_ids(item.addrs)] == bytes_before).all()
            if what != "the payload":
                assert (content(receiver)[untold] == 0).all()
            time.sleep(0.02)
        assert receiver.inbox.receive(0) is None
        for item in items:
            item.close()
