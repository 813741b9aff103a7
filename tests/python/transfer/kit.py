"""Shared by the tests of transfer: a second process that is driven over a socket, pairs of pools that know each other
by one route, and the check that nothing is left behind.

A test writes code for the pool at the other end: `pair.b("pool.alloc(3)")` runs there and returns what came out. For
the route "loopback" the other end is a pool in this process, for the others it is one in another process; tests do not
need to know. Nor do they need to know where HBM is: KVPOOL_TEST_DEVICE=cuda:0 puts it on a GPU, with the routes that a
GPU has.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import ctypes
import functools
import importlib.util
import itertools
import multiprocessing.connection
import os
import signal
import socket
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
from kit import DEVICE, prompt, small_layout, small_pool, state_of, store
from kit import content as elements_of

import kvpool
from kvpool.transfer.libraries import nccl_library

__all__ = [
    "BLOCK_ROUTES", "NEAR", "NEAR_ROUTES", "ON_GPU", "SECRET", "UCX_SETTINGS", "Child", "Pair", "address_of",
    "blocks_at_peers", "can_checksum", "content", "environment", "eventually", "fill", "local_settings", "nccl_setting",
    "not_on_gpu", "pair_of", "prompt", "route_or_skip", "shared_child", "small_layout", "small_pool", "state_of",
    "stop_process", "store", "wait_for",
]  # fmt: skip

PRELUDE = "from transfer.kit import *\nimport asyncio, kvpool, numpy as np, os, signal, threading, time"
SECRET = "what the tests know"
# The transports of UCX on each route by it, which it reads from the environment when a context is made.
UCX_SETTINGS = {
    "ucx-cma": {"UCX_TLS": "posix,cma"},
    "ucx-tcp": {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"},
}
# Two processes on one GPU are two hosts to NCCL, or it refuses.
NCCL_SETTINGS = {"nccl": {"NCCL_HOSTID": "kvpool-test-b"}}
ROUTE_SETTINGS = UCX_SETTINGS | NCCL_SETTINGS

ON_GPU = DEVICE != "cpu"  # where HBM is of the pools that tests make here
NEAR = "cuda_ipc" if ON_GPU else "shm"  # between processes of one host
NEAR_ROUTES = ["loopback", NEAR, "sock-unix"]
ROUTES_OF_HOST = ["loopback", "shm", "cma", "sock-unix", "sock-tcp", *UCX_SETTINGS]
ROUTES_OF_GPU = ["loopback", "cuda_ipc", "sock-unix", "sock-tcp", "nccl"]
BLOCK_ROUTES = ROUTES_OF_GPU if ON_GPU else ROUTES_OF_HOST
_numbers = itertools.count(1)


# ---- the other process


class Remote:
    """A Python process that runs the code that it is sent, one piece after another, in one namespace."""

    ANSWER_SECONDS = 120.0  # longer than whatever the code waits for

    def __init__(self, ours: socket.socket) -> None:
        self._connection = multiprocessing.connection.Connection(ours.detach())

    def __call__(self, code: str, **values: Any) -> Any:
        """Runs code; returns the value of its last expression. Errors there are raised here."""
        self.send(code, **values)
        return self.answer()

    def send(self, code: str, **values: Any) -> None:
        self._connection.send((code, values))

    def answer(self, timeout: float | None = None) -> Any:
        timeout = self.ANSWER_SECONDS if timeout is None else timeout
        assert self._connection.poll(timeout), f"no answer within {timeout} s"
        worked, value, text = self._connection.recv()
        if worked:
            return value
        value.add_note(text) if hasattr(value, "add_note") else None
        raise value


class Child(Remote):
    """One that is forked by a process that has the imports of this module."""

    def __init__(self, **variables: str) -> None:
        """`variables`: its environment, in place of this process's."""
        ours, theirs = socket.socketpair()
        with theirs, open(os.devnull) as nothing:
            self.process = forked.start(
                "from transfer.kit import serve\nserve(descriptors[0])",
                environment=os.environ | variables, files=[nothing.fileno(), 1, 2], descriptors=[theirs.fileno()],
            )  # fmt: skip
        super().__init__(ours)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """It has ended, or has stopped, when this returns."""
        if number == signal.SIGSTOP:
            stop_process(self.process.pid)
            return
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait(60)

    def close(self) -> None:
        self._connection.close()  # the process ends when it reads the end of its orders
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()


def serve(descriptor: int) -> None:
    """The main loop of a Child."""
    obey(
        multiprocessing.connection.Connection(descriptor), {},
        "from kit import *\nfrom transfer.kit import *\nimport kvpool, numpy as np, os, signal, threading, time",
    )  # fmt: skip


def obey(connection: multiprocessing.connection.Connection, namespace: dict[str, Any], prelude: str) -> None:
    """The other side of a Remote, until this one ends. Closes the pools that are left."""
    run(prelude, namespace)
    while True:
        try:
            code, values = connection.recv()
        except (EOFError, OSError):
            break
        try:
            answer = (True, run(code, namespace, **values), "")
        except Exception as error:
            answer = (False, error, traceback.format_exc())
        connection.send(answer)
    for value in namespace.values():
        if isinstance(value, kvpool.Pool):
            value.close()


def run(code: str, namespace: dict[str, Any], **values: Any) -> Any:
    """Executes code; the value of its last line, if that is an expression."""
    namespace.update(values)
    tree = ast.parse(code)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<test>", "exec"), namespace)
    if last is None:
        return None
    return eval(compile(ast.Expression(last.value), "<test>", "eval"), namespace)


_shared: dict[str, Child] = {}


def shared_child(route: str) -> Child:
    """One process serves many tests; a test that ends or damages it takes a new one. Each way of UCX, and NCCL,
    has another one, whose environment says so from its start."""
    way = route if route in ROUTE_SETTINGS else ""
    if way not in _shared or _shared[way].process.poll() is not None:
        _shared[way] = Child(**ROUTE_SETTINGS.get(way, {}))
        atexit.register(_shared[way].close)
    return _shared[way]


# ---- pairs of pools


@dataclass
class Pair:
    """Two pools that know each other: `a` is here; `b` runs code where the other one is, which is `pool` there."""

    a: kvpool.Pool
    b: Callable[..., Any]
    to_b: str  # a's name for b
    to_a: str
    child: Child | None


def not_on_gpu(why: str) -> Any:
    """A mark for tests of features that pools on a GPU lack. tests/python/gpu_suites.py knows which have it."""
    return pytest.mark.skipif(ON_GPU, reason=f"not for a GPU: {why}")


@functools.cache
def nccl_setting() -> str | None:
    """A setting `nccl` with which there is one: what the environment says, the wheel's, the system's; None: none."""
    name = nccl_library(os.environ.get("KVPOOL_NCCL") or "wheel")
    if name in ("wheel", "system"):
        name = "libnccl.so.2"
    try:
        ctypes.CDLL(name)
    except OSError:
        return None
    return "system" if name == "libnccl.so.2" else name


def can_checksum(route: str) -> bool:
    """The CPU does not read content that NCCL carries."""
    return route != "nccl"


def route_or_skip(route: str) -> str:
    if route == "nccl" and nccl_setting() is None:
        pytest.skip("NCCL is not installed")
    if route.startswith("ucx") and importlib.util.find_spec("libucx") is None:
        pytest.skip("libucx is not installed")
    if route in ("cma", "ucx-cma") and not _may_write_processes():
        pytest.skip("this machine lets no process write to another one's memory")
    return route


def _may_write_processes() -> bool:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip() in "01"
    return True


def local_settings(route: str) -> dict[str, Any]:
    """Settings under which blocks travel by this route and no other one."""
    name = route.partition("-")[0]
    settings = {"routes": (name,), "secret": SECRET, "lease_s": 10.0, "prefer_unix_socket": route != "sock-tcp"}
    return settings | ({"nccl": nccl_setting()} if route == "nccl" else {})


@contextlib.contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """This process has them meanwhile, for a library that asks now."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def address_of(route: str) -> str:
    if route == "sock-tcp":
        return "tcp:127.0.0.1:0"
    return f"unix:@kvpool-test-{os.getpid()}-{next(_numbers)}"


@contextlib.contextmanager
def pair_of(
    route: str, *, a: dict[str, Any] | None = None, b: dict[str, Any] | None = None, child: Child | None = None,
    clean: bool = True,
) -> Iterator[Pair]:  # fmt: skip
    """Two pools that are connected, a to b; when it is over, neither may have anything of the other's."""
    route_or_skip(route)
    options = local_settings(route)
    a_options, b_options = options | (a or {}), options | (b or {})
    if route == "loopback":
        namespace: dict[str, Any] = {}
        run(PRELUDE, namespace)

        def there(code: str, **values: Any) -> Any:
            return run(code, namespace, **values)

    else:
        child = child or shared_child(route)
        there = child
    there("pool = small_pool(**options)", options=b_options)
    pool = small_pool(**a_options)
    try:
        address = there("pool.peers.listen(address)", address=address_of(route))
        with environment(UCX_SETTINGS.get(route, {})):
            to_b = pool.peers.connect(address, timeout=60)
        to_a = there("wait_for(lambda: pool.peers.list())[-1].name")
        assert to_a == pool.peers.name
        yield Pair(pool, there, to_b, to_a, child)
        if clean:
            eventually(lambda: blocks_at_peers(pool) == there("blocks_at_peers(pool)") == 0)
            pool.audit()
            there("pool.audit()")
    finally:
        pool.close()
        with contextlib.suppress(OSError, EOFError):
            there("pool.close()")


def blocks_at_peers(pool: kvpool.Pool) -> int:
    """Blocks that are neither free, nor anybody's here."""
    stats = pool.audit()
    return sum(tier.reserved + tier.lent + tier.quarantined for tier in (stats.hbm, stats.dram))


# ---- content


def fill(pool: kvpool.Pool, addrs: Any, seed: int = 1) -> list[bytes]:
    """Writes random numbers into blocks, and returns each block's content."""
    random = np.random.default_rng(seed)
    for view, block in _blocks(pool, addrs):
        view[block] = random.integers(0, 1 << 16, view.shape[1:])
    return content(pool, addrs)


def content(pool: kvpool.Pool, addrs: Any) -> list[bytes]:
    """The content of each block, in the layout's order."""
    return [view[block].tobytes() for view, block in _blocks(pool, addrs)]


def _blocks(pool: kvpool.Pool, addrs: Any) -> Iterator[tuple[Any, int]]:
    """The elements of the medium of each address, and the block's place in them."""
    views: dict[int, Any] = {}
    for addr in addrs:
        place = kvpool.decode_address(int(addr))
        if place.medium not in views:
            views[place.medium] = elements_of(pool, place.medium)
        yield views[place.medium], place.block


# ---- time


def wait_for(look: Callable[[], Any], seconds: float = 60) -> Any:
    """The first true value of `look`; fails if there is no such value in time. A minute: a machine may be busy."""
    until = time.monotonic() + seconds
    while True:
        value = look()
        if value:
            return value
        assert time.monotonic() < until, "nothing for too long"
        time.sleep(0.001)


def eventually(holds: Callable[[], bool], seconds: float = 60) -> None:
    """Fails unless it holds within so many seconds."""
    wait_for(holds, seconds)


def stop_process(pid: int) -> None:
    """It does nothing more when this returns: on a busy machine a signal may take a while to be taken."""

    def states() -> list[str]:
        found = []
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
                found.append((task / "stat").read_text().rpartition(")")[2].split()[0])
        return found

    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: all(state == "T" for state in states()))
