"""Python processes that are forked by one that has imported what tests need, so that each is there within milliseconds.

An interpreter that imports NumPy, pytest and kvpool by itself takes most of a second of a processor. A fork has no
thread, pool or library of its parent's beside those imports, and a fork that ends does so as any interpreter. Its
environment, its files and where it looks for modules are those of the process that asks for it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ForkedProcess", "Parent", "begin", "run", "start"]


@dataclass(frozen=True)
class Parent:
    """What forks have in common. Each process that asks for forks has one of a kind."""

    python: str
    imported: str  # a module, with all that it imports; it starts no thread
    # Variables that are read when a module is imported: forks share a parent if these are the same.
    at_import: tuple[str, ...] = ()
    flags: tuple[str, ...] = ("-X", "faulthandler")


OWN = Parent(
    sys.executable, "transfer.kit", ("KVPOOL_LONG", "KVPOOL_TEST_DEVICE"), ("-X", "faulthandler", "-W", "error")
)
ORDER_BYTES = 1 << 20  # code, and the environment
_STATUS_BYTES = 16


class ForkedProcess:
    """As a subprocess.Popen: it is not this process's child, so its parent reports its end."""

    def __init__(self, pid: int, pidfd: int, status: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd = pidfd
        self._status = status

    def poll(self) -> int | None:
        """How it has ended; None: not yet."""
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return code

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Does nothing when it has ended."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            said = os.read(self._status, _STATUS_BYTES)
            assert said, "the process that forks has ended"
            self.returncode = int(said)
            self.close()
        return self.returncode

    def close(self) -> None:
        """Looks at it no more."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            os.close(self._status)
            self._pidfd = self._status = -1

    def __del__(self) -> None:
        self.close()


class _Forker:
    """The parent, as the process that asks for forks sees it."""

    def __init__(self, parent: Parent, environment: dict[str, str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, ORDER_BYTES)
        searched = sys.path if parent is OWN else environment.get("PYTHONPATH", "").split(os.pathsep)
        path = os.pathsep.join([str(Path(__file__).parent), *filter(None, searched)])
        self._mutex = threading.Lock()
        self._socket = ours
        self._process = subprocess.Popen(
            [parent.python, *parent.flags, "-c",
             f"import forked; exec(forked.begin({theirs.fileno()}, {parent.imported!r}))"],
            pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
            env=environment | {"PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},  # which would be a thread each
        )  # fmt: skip
        theirs.close()
        atexit.register(self.close)

    def fork(self, order: bytes, files: Sequence[int]) -> ForkedProcess:
        ends, tells = os.pipe()
        try:
            with self._mutex:
                socket.send_fds(self._socket, [order], [tells, *files])
                said, descriptors, *_ = socket.recv_fds(self._socket, _STATUS_BYTES, 1)
        finally:
            os.close(tells)
        assert said, "the process that forks has ended"
        return ForkedProcess(int(said), descriptors[0], ends)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


_forkers: dict[tuple[Parent, tuple[str | None, ...]], _Forker] = {}
_starting = threading.Lock()


def start(
    code: str,
    *,
    environment: dict[str, str],
    files: Sequence[int],
    descriptors: Sequence[int] = (),
    parent: Parent = OWN,
) -> ForkedProcess:
    """Forks a process that runs this code as its main module.

    Args:
        code: It finds its numbers of `descriptors` in a list of that name.
        environment: All of it.
        files: Its standard input, output and error.
        descriptors: More that it is given.
        parent: Of another interpreter than this one's, forks look for modules in PYTHONPATH, and then where that
            interpreter does.
    """  # fmt: skip
    key = parent, tuple(environment.get(name) for name in parent.at_import)
    with _starting:
        forker = _forkers.get(key) or _forkers.setdefault(key, _Forker(parent, environment))
    path = [path for path in sys.path if path] if parent is OWN else None
    order = pickle.dumps((code, environment, path, os.getcwd()))
    assert len(order) < ORDER_BYTES / 2
    return forker.fork(order, [*files, *descriptors])


def run(code: str, *, timeout: float, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs this code in a fork, to its end, and returns its output."""
    with open(os.devnull) as nothing, tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = start(code, environment=environment, files=[nothing.fileno(), out.fileno(), errors.fileno()])
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired as late:
            process.send_signal(signal.SIGKILL)
            process.wait(60)
            for file in (out, errors):
                file.seek(0)
            late.output, late.stderr = out.read(), errors.read()
            raise
        for file in (out, errors):
            file.seek(0)
        return subprocess.CompletedProcess([code], status, out.read(), errors.read())


# ---- the other side


def begin(number: int, imported: str) -> str:
    """What the parent runs: it returns in each fork, with the code for it.

    The parent tells how each of them has ended, until nobody can ask for more.
    """
    importlib.import_module(imported)
    told_path = os.environ["PYTHONPATH"].split(os.pathsep)
    own_path = [
        place for place in sys.path if place and place not in told_path
    ]  # where the interpreter looks by itself
    gc.collect()
    gc.freeze()  # forks share these pages as long as none of them writes there
    heard, told = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(told)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    interrupts = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    living: dict[int, int] = {}  # where the end of each is reported
    orders = socket.socket(fileno=number)
    while True:
        ready, *_ = select.select([orders, heard], [], [])
        if heard in ready:
            os.read(heard, 4096)
            _bury(living)
        if orders not in ready:
            continue
        order, descriptors, *_ = socket.recv_fds(orders, ORDER_BYTES, 16)
        if not order:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            orders.close()
            signal.set_wakeup_fd(-1)
            for unused in (heard, told, *living.values()):
                os.close(unused)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, interrupts)
            return _become(order, descriptors, own_path)
        living[pid] = descriptors[0]
        for given in descriptors[1:]:
            os.close(given)
        pidfd = os.pidfd_open(pid)
        socket.send_fds(orders, [str(pid).encode()], [pidfd])
        os.close(pidfd)


def _bury(living: dict[int, int]) -> None:
    while living:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        tells = living.pop(pid)
        with contextlib.suppress(BrokenPipeError):  # no one reads it any more
            os.write(tells, str(os.waitstatus_to_exitcode(status)).encode())
        os.close(tells)


def _become(order: bytes, given: list[int], own_path: list[str]) -> str:
    code, environment, path, folder = pickle.loads(order)
    tells, *files = given
    os.close(tells)
    for number, file in enumerate(files[:3]):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    if path is None:
        path = [*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *own_path]
    sys.path[:] = path
    os.chdir(folder)
    return f"descriptors = {files[3:]}\n{code}"
