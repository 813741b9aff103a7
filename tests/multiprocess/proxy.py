"""A cable under the test's control: slow, stalled, cut or torn out, each direction by itself."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

_BYTES = 1 << 16
_PATIENCE_SECONDS = 60


class Proxy:
    """Forwards what arrives at its Unix or TCP address to the address of a pool.

    `hold(up=..., down=...)` stops forwarding: up is what goes to the pool. Who writes then meets full buffers.
    `limit(n)` forwards n more bytes up, and then does `at_limit`. `mangle` gets what goes up, and may change it.

    One thread owns the sockets, and does what it is told between two pieces: a socket that another thread closed could
    be one of the pool's by now, of the same number, when the next piece is written to it.
    """

    def __init__(self, address: str) -> None:
        self._tcp = address.startswith("tcp:")
        self._target: Any = address.partition(":")[2]
        if self._tcp:
            host, _, port = self._target.rpartition(":")
            self._target = (host, int(port))
            self._listener = socket.create_server(("127.0.0.1", 0))
            self.address = f"tcp:127.0.0.1:{self._listener.getsockname()[1]}"
        else:
            self._target = self._target.replace("@", "\0", 1)
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind("")  # the kernel finds an abstract name
            self._listener.listen()
            self.address = f"unix:@{self._listener.getsockname()[1:].decode()}"
        self._held: dict[str, bool] = {"up": False, "down": False}
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._left = -1
        self._at_limit: Callable[[], None] = self.reset
        self.mangle: Callable[[bytes], bytes] = bytes
        self._orders: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]] = queue.SimpleQueue()
        self._wake, self._woken = os.pipe()[::-1]
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._over = False
        self._tearing = False
        self._thread.start()

    def hold(self, *, up: bool, down: bool) -> None:
        """Holds later bytes back, or lets them go on."""
        self._tell(lambda: self._held.update(up=up, down=down))

    def limit(self, up_bytes: int, at_limit: Callable[[], None] | None = None) -> None:
        def set_limit() -> None:
            self._left = up_bytes
            self._at_limit = at_limit or self.reset

        self._tell(set_limit)

    def reset(self) -> None:
        """Tears all connections out: a reset where the socket knows one, and whatever is under way is lost."""
        if threading.current_thread() is self._thread:
            return self._tear()
        self._tearing = True  # threads that wait for a full socket need not wait any longer
        return self._tell(self._tear)

    def close(self) -> None:
        self._over = True
        self._look()
        self._thread.join(_PATIENCE_SECONDS)
        assert not self._thread.is_alive()
        self._tear()
        self._listener.close()
        os.close(self._wake)
        os.close(self._woken)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _look(self) -> None:
        os.write(self._wake, b"x")

    def _tell(self, order: Callable[[], None]) -> None:
        """Returns when the thread has done it."""
        done = threading.Event()
        self._orders.put((order, done))
        self._look()
        assert done.wait(_PATIENCE_SECONDS), "the proxy does not listen"

    def _tear(self) -> None:
        for one in (end for pair in self._pairs for end in pair):
            with contextlib.suppress(OSError):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.close()
        self._pairs.clear()
        self._tearing = False

    def _run(self) -> None:
        while not self._over:
            while not self._orders.empty():
                order, done = self._orders.get()
                order()
                done.set()
            ways = {}
            for client, server in self._pairs:
                if not self._held["up"]:
                    ways[client] = (server, "up")
                if not self._held["down"]:
                    ways[server] = (client, "down")
            ready, _, _ = select.select([self._listener, self._woken, *ways], [], [], 1)
            if self._woken in ready:
                os.read(self._woken, 4096)
                continue
            if self._listener in ready:
                self._accept()
            for source in ready:
                if source in ways:
                    self._forward(source, *ways[source])

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        server = socket.socket(socket.AF_INET if self._tcp else socket.AF_UNIX)
        try:
            server.connect(self._target)
        except OSError:
            client.close()
            server.close()
            return
        self._pairs.append((client, server))

    def _forward(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        try:
            limited = way == "up" and self._left >= 0
            if not limited or self._left > 0:
                data = source.recv(min(_BYTES, self._left) if limited else _BYTES)
                if not data:
                    self._part(source)
                    return
                self._send(sink, self.mangle(data) if way == "up" else data)
            else:
                data = b""
            if limited:
                self._left -= len(data)
                if self._left == 0:
                    self._left = -1
                    self._at_limit()
        except BlockingIOError:
            return
        except OSError:
            self._part(source)

    def _send(self, sink: socket.socket, data: bytes) -> None:
        while data and not self._over and not self._tearing:  # the rest is lost with the connection
            if select.select([], [sink], [], 0.05)[1]:
                with contextlib.suppress(BlockingIOError):
                    data = data[sink.send(data, socket.MSG_DONTWAIT) :]

    def _part(self, one: socket.socket) -> None:
        for pair in [pair for pair in self._pairs if one in pair]:
            self._pairs.remove(pair)
            for end in pair:
                end.close()
