"""Processes that tests kill, stop, cut off and start again, and what they run.

A victim is forked by a nursery that has imported everything and has no threads, so that it is there within
milliseconds. The test has its pidfd: it can neither miss it nor hit another process, also across PID namespaces. A
victim ends with its nursery, and a nursery with the test.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import multiprocessing.connection
import os
import random
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deeds import (
    LEASE,
    Reader,
    await_no_peers,
    big_pool,
    call,
    check,
    dropped,
    receive_for_ever,
    send_and_come_back,
    send_for_ever,
    send_some,
    soak,
    stamp,
    things,
)  # fmt: skip
from kit import LONG, repeats
from transfer.kit import Remote, blocks_at_peers, eventually, obey, wait_for

__all__ = [
    "LEASE", "LONG", "Nursery", "Reader", "Victim", "await_no_peers", "big_pool", "blocks_at_peers", "call", "check",
    "dropped", "eventually", "receive_for_ever", "repeats", "seed_of", "send_and_come_back", "send_for_ever",
    "send_some", "soak", "stamp", "things", "wait_for",
]  # fmt: skip

_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_ANSWER_SECONDS = 120  # longer than whatever it waits for


# ---- seeds


def seed_of(request: Any) -> int:
    """The seed of a test, printed; KVPOOL_SEED replays it. (Of a range, which is for the C++ tests, the first.)"""
    given = os.environ.get("KVPOOL_SEED", "").partition("..")[0]
    seed = int(given, 0) if given else random.SystemRandom().randrange(1 << 32)
    print(f"{request.node.name}: KVPOOL_SEED={seed}")
    return seed


# ---- processes


@functools.cache
def namespace_command() -> tuple[str, ...]:
    """The command that starts a program in a new PID namespace; () if the machine does not permit it.

    To a pool such a process is one of another host: the two stay on TCP, where others would meet over a Unix socket.
    """
    for more in ((), ("--user", "--map-root-user")):
        command = ("unshare", *more, "--pid", "--fork", "--kill-child")
        with contextlib.suppress(FileNotFoundError):
            if subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0:
                return command
    return ()


class Victim(Remote):
    """One that is forked by a nursery; `tell(value)` there is one more answer here."""

    ANSWER_SECONDS = _ANSWER_SECONDS

    def __init__(self, pidfd: int, ours: socket.socket) -> None:
        super().__init__(ours)
        self.pidfd = pidfd

    def told(self) -> list[Any]:
        """Its output so far, or until it ended."""
        said = []
        with contextlib.suppress(EOFError, OSError):
            while self._connection.poll(0):
                said.append(self._connection.recv())
        return said

    def signal(self, number: int) -> None:
        signal.pidfd_send_signal(self.pidfd, number)

    def stop(self) -> None:
        """It does nothing more when this returns."""
        self.signal(signal.SIGSTOP)
        wait_for(lambda: all(state == "T" for state in self._states()))

    def _states(self) -> list[str]:
        (pid,) = [
            line.split()[1]
            for line in Path(f"/proc/self/fdinfo/{self.pidfd}").read_text().splitlines()
            if line.startswith("Pid:")
        ]
        states = []
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
                states.append((task / "stat").read_text().rpartition(")")[2].split()[0])
        return states

    def wake(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """It is gone when this returns."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self.wait()

    def wait(self, seconds: float = 60) -> None:
        assert select.select([self.pidfd], [], [], seconds)[0], "the process does not end"

    def close(self) -> None:
        if self.pidfd >= 0:
            self.kill()
            self._connection.close()
            os.close(self.pidfd)
            self.pidfd = -1


class Nursery:
    """Starts victims, with some modules imported. `far`: to pools here they are as on another host, and stay on TCP."""

    def __init__(self, far: bool = False, command: tuple[str, ...] = (), modules: str = "victims") -> None:
        ours, theirs = socket.socketpair()
        here = Path(__file__).parent
        path = [str(here), str(here.parent / "python"), *filter(None, sys.path)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "OPENBLAS_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [*command, *(namespace_command() if far else ()), sys.executable, "-X", "faulthandler", "-W", "error", "-c",
             f"import victims, {modules}; victims.nurse({theirs.fileno()})"],
            pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        theirs.close()
        ours.settimeout(_ANSWER_SECONDS)
        self._socket = ours
        self._victims: list[Victim] = []

    def spawn(self, *, own_network: bool = False) -> Victim:
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._socket, [b"n" if own_network else b"-"], [theirs.fileno()])
        _, (pidfd,), _, _ = socket.recv_fds(self._socket, 1, 1)
        self._victims = [one for one in self._victims if one.pidfd >= 0]
        self._victims.append(Victim(pidfd, ours))
        return self._victims[-1]

    @contextlib.contextmanager
    def victim(self, **options: Any) -> Iterator[Victim]:
        one = self.spawn(**options)
        try:
            yield one
        finally:
            one.close()

    def close(self) -> None:
        for one in self._victims:
            one.close()
        self._socket.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(60)


def nurse(descriptor: int) -> None:
    """Runs in a nursery: one fork for each message, until the connection ends."""
    _die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries them
    with socket.socket(fileno=descriptor) as orders:
        while _bear(orders):
            pass


def _bear(orders: socket.socket) -> bool:
    """False: nobody can ask for more."""
    kind, descriptors, _, _ = socket.recv_fds(orders, 1, 1)
    if not kind:
        return False
    pid = os.fork()
    if pid == 0:
        orders.close()
        _grow_up(descriptors[0], kind)
    os.close(descriptors[0])
    pidfd = os.pidfd_open(pid)
    socket.send_fds(orders, [b"k"], [pidfd])
    os.close(pidfd)
    return True


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _grow_up(descriptor: int, kind: bytes) -> None:
    try:
        _die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if kind == b"n" and ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        _obey(descriptor)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _obey(descriptor: int) -> None:
    connection = multiprocessing.connection.Connection(descriptor)
    namespace: dict[str, Any] = {"tell": lambda value: connection.send((True, value, ""))}
    obey(
        connection, namespace,
        "from victims import *\nfrom transfer.kit import *\nimport gc, kvpool, os, random, threading, time",
    )  # fmt: skip
