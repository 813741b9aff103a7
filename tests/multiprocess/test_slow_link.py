"""A slow network, and one transfer among several that is cancelled or comes too late.

Bugs these tests are there to find (the numbers are those of docs/how-to/failures.md): an end of one transfer that ends
the link, and with it all others and what was lent (12); half a frame that the receiver takes for a whole one (1).
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from proxy import Proxy
from victims import LONG, blocks_at_peers, eventually, seed_of

import kvpool

SECRET = "s" * 40
BLOCK_BYTES = 256 << 10
OPTIONS = {"secret": SECRET, "prefer_unix_socket": False, "lease_s": 10.0, "routes": ("sock",)}


class SlowCable:
    """Forwards one connection to a TCP address, so many bytes a second on the way there."""

    def __init__(self, address: str, bytes_per_s: float) -> None:
        host, _, port = address.removeprefix("tcp:").rpartition(":")
        self._target = host, int(port)
        self._rate = bytes_per_s
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)  # or the kernel takes all at once
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self.address = f"tcp:127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        near, _ = self._listener.accept()
        with near, socket.create_connection(self._target) as far:
            back = threading.Thread(target=self._pump, args=(far, near, None), daemon=True)
            back.start()
            self._pump(near, far, self._rate)
            back.join()

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket, rate: float | None) -> None:
        free_at = time.monotonic()
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 15):
                target.sendall(data)
                if rate is None:
                    continue
                free_at = max(free_at, time.monotonic() - 0.05) + len(data) / rate
                time.sleep(max(0.0, free_at - time.monotonic()))
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """After the pools, which end the connection."""
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._listener.close()


@contextlib.contextmanager
def two_pools(blocks: int = 64) -> Iterator[tuple[kvpool.Pool, kvpool.Pool, str]]:
    layout = kvpool.RawLayout(block_bytes=BLOCK_BYTES, block_tokens=16)
    with (
        kvpool.Pool(layout, hbm_blocks=blocks, name="receiver", **OPTIONS) as receiver,
        kvpool.Pool(layout, hbm_blocks=blocks, name="sender", **OPTIONS) as sender,
    ):
        yield receiver, sender, receiver.peers.listen("tcp:127.0.0.1:0")


def numbers(pool: kvpool.Pool, addrs: np.ndarray) -> np.ndarray:
    """The blocks, to look at and to write."""
    content = pool.tensor().numpy().reshape(-1, BLOCK_BYTES).view(np.uint64)
    return content[kvpool.block_ids(addrs)]


def stamp(pool: kvpool.Pool, addrs: np.ndarray, number: int) -> None:
    pool.tensor().numpy().reshape(-1, BLOCK_BYTES).view(np.uint64)[kvpool.block_ids(addrs)] = number


@pytest.mark.parametrize("how", ["cancel", "deadline"])
@pytest.mark.parametrize("megabytes_per_s", [1, 10, 60] if LONG else [10])
def test_ending_one_transfer_does_not_end_the_others(megabytes_per_s, how, request):
    dice = random.Random(seed_of(request))
    large, small = {1: (20, 2), 10: (32, 8), 60: (128, 8)}[megabytes_per_s]  # more than the kernel takes at once
    ended_early = 0
    with two_pools(blocks=256) as (receiver, sender, address):
        cable = SlowCable(address, megabytes_per_s * 1e6)
        peer = sender.peers.connect(cable.address, timeout=60)
        lent = sender.alloc(1, instance=peer)
        for number in range(1, 21 if LONG else 4):
            ended, other = sender.alloc(large), sender.alloc(small)
            stamp(sender, other, number)
            first = sender.transfer(peer, ended, timeout=60 if how == "cancel" else 0.15)
            second = sender.transfer(peer, other, timeout=120)
            if how == "cancel":
                time.sleep(0.05 + dice.random() * 0.1)
                first.cancel()
            sender.free(ended)
            try:
                first.wait()
                receiver.inbox.receive(60).close()  # it was faster
            except (kvpool.Cancelled, kvpool.DeadlineExceeded):
                ended_early += 1
            second.wait()
            sender.transfer(peer, other[:1], to=lent, private=b"again", timeout=120).wait()  # lent as before
            for expected in (small, 1):
                with receiver.inbox.receive(60) as item:
                    assert len(item.addrs) == expected
                    assert (numbers(receiver, item.addrs) == number).all()
            sender.free(other)
        sender.free(lent)
        assert ended_early > 0
        assert [one.name for one in sender.peers.list()] == [peer]
        eventually(lambda: blocks_at_peers(receiver) == 0)
        eventually(lambda: sender.audit().hbm.active == sender.stats().hbm.reserved == 0)
        sender.close()
        receiver.close()
        cable.close()


def test_blocks_of_a_cancelled_transfer_are_free_while_the_link_stands_still():
    """The receiver takes nothing meanwhile, and cannot answer."""
    with two_pools() as (receiver, sender, address), Proxy(address) as cable:
        peer = sender.peers.connect(cable.address, timeout=60)
        blocks = sender.alloc(64)  # 16 MiB: more than the sockets on the way hold
        stamp(sender, blocks, 1)
        cable.hold(up=True, down=True)
        handle = sender.transfer(peer, blocks[:1], timeout=60)  # its reservation is not answered either
        handle.cancel()
        cable.hold(up=False, down=False)
        with pytest.raises(kvpool.Cancelled):
            handle.wait(60)
        lent = sender.alloc(64, instance=peer, timeout=60)
        cable.hold(up=True, down=True)
        handle = sender.transfer(peer, blocks, to=lent, timeout=60)
        eventually(lambda: handle.progress[0] > 0)
        time.sleep(0.2)
        assert handle.progress[0] < handle.progress[1]  # it stands still within a frame
        handle.cancel()
        sender.free(blocks)
        eventually(lambda: sender.audit().hbm.free == sender.stats().hbm.capacity)
        blocks = sender.alloc(64)
        stamp(sender, blocks, 2)
        assert not handle.done(), handle.exception()
        cable.hold(up=False, down=False)
        with pytest.raises(kvpool.Cancelled):
            handle.wait(60)
        sender.transfer(peer, blocks, to=lent, private=b"", timeout=60).wait()
        with receiver.inbox.receive(60) as item:
            assert (numbers(receiver, item.addrs) == 2).all()
