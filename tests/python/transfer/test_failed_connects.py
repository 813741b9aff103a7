"""A first call that fails leaves no trace, and says why without the secret."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from kit import run_script
from transfer.kit import (
    Child,
    address_of,
    small_layout,
    small_pool,
)  # fmt: skip

import kvpool


def test_a_first_call_that_is_wrong_leaves_no_trace():
    with small_pool() as pool:
        for call in (pool.peers.listen, pool.peers.connect):
            with pytest.raises(kvpool.ArgumentError, match="tcp:HOST:PORT"):
                call("tcp:nonsense")  # said first, whatever else is wrong
            with pytest.raises(kvpool.ArgumentError, match="secret"):
                call("tcp:127.0.0.1:0")
            assert pool.peers.name is None
        pool.peers.listen(address_of("shm"))


FAILURES = (
    "wrong secret", "nobody there", "silence", "a local socket that refuses", "another layout", "unix without a secret",
)  # fmt: skip


def fail_to_connect(pool: kvpool.Pool, how: str, child: Child) -> type[kvpool.Error]:
    """Returns the error that connect raised. The pool has the secret "first", or none for "unix without a secret"."""
    listen = "pool = small_pool(name='other', **options)\npool.peers.listen(where)"
    tcp = {"where": "tcp:127.0.0.1:0"}
    options: dict[str, Any] = {"timeout": 60}
    if how == "wrong secret":
        where = child(listen, options={"secret": "right"}, **tcp)
    elif how == "nobody there":
        where, options["wait"] = "tcp:127.0.0.1:1", False
    elif how == "silence":
        where, options["timeout"] = address_of("shm"), 0.1
        silent = socket.socket(socket.AF_UNIX)
        silent.bind(where.removeprefix("unix:").replace("@", "\0"))
        silent.listen()
    elif how == "a local socket that refuses":
        where = child(listen, options={"secret": "first"}, **tcp)
        child(SHUT_LISTENERS)
    elif how == "another layout":
        where = child(listen, options={"secret": "first", "layout": small_layout(layers=3)}, **tcp)
    else:
        where = child(listen, options={"secret": "first"}, where=address_of("shm"))
    with pytest.raises(kvpool.Error) as caught:
        pool.peers.connect(where, **options)
    child("pool.close()" if how not in ("nobody there", "silence") else "None")
    if how == "silence":
        silent.close()
    return type(caught.value)


SHUT_LISTENERS = """
import socket, stat
for fd in map(int, os.listdir("/proc/self/fd")):
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            continue
        one = socket.socket(fileno=os.dup(fd))
    except OSError:
        continue
    if one.family == socket.AF_UNIX and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
"""


@pytest.mark.parametrize("how", FAILURES)
def test_a_connect_that_fails_leaves_no_trace(how, child):
    expected = {
        "wrong secret": kvpool.AuthError, "nobody there": kvpool.PeerLost, "silence": kvpool.DeadlineExceeded,
        "a local socket that refuses": kvpool.PeerLost, "another layout": kvpool.LayoutMismatch,
        "unix without a secret": kvpool.AuthError,
    }  # fmt: skip
    secret = "" if how == "unix without a secret" else "first"
    with small_pool(secret=secret) as pool:
        settings, addrs = pool.settings, pool.alloc(1)
        for _ in range(2):
            assert fail_to_connect(pool, how, child) is expected[how]
            assert (pool.peers.name, pool.peers.list(), pool.peers.totals()) == (None, [], {})
            assert pool.settings == settings
            with pytest.raises(kvpool.StateError, match="no peers"):
                pool.peers.on_change(print)
            assert kvpool.decode_address(int(pool.alloc(1)[0])).instance == 0
        listen = "pool = small_pool(name='b', secret=secret)\npool.peers.listen(where)"
        to = child(listen, secret=secret, where=address_of("shm"))
        assert pool.peers.connect(to, timeout=60) == "b"
        pool.transfer("b", addrs).wait(60)
        assert [peer.name for peer in pool.peers] == ["b"]


def test_a_listen_that_fails_leaves_no_trace():
    with small_pool() as taken, small_pool(name="x", secret="first") as pool:
        where = taken.peers.listen(address_of("shm"))
        with pytest.raises(kvpool.StateError, match="cannot listen"):
            pool.peers.listen(where)
        assert pool.peers.name is None
        assert kvpool.decode_address(int(pool.alloc(1)[0])).instance == 0
        pool.peers.listen("tcp:127.0.0.1:0")
        assert pool.peers.name == "x"


def test_a_first_call_that_is_interrupted_while_it_makes_the_service_leaves_no_trace():
    class Interrupted(kvpool.Pool):
        def _start_service(self, *args: Any, **options: Any) -> list[str]:
            super()._start_service(*args, **options)
            raise KeyboardInterrupt  # as Python notices Ctrl-C: when a long call of the core returns

    with Interrupted(small_layout(), hbm_blocks=2) as pool:
        for call in (pool.peers.listen, pool.peers.connect):
            with pytest.raises(KeyboardInterrupt):
                call(address_of("shm"))
            assert pool.peers.name is None
        pool.__class__ = kvpool.Pool
        pool.peers.listen(address_of("shm"))


@pytest.mark.parametrize("verb", ["connect", "listen"])
def test_a_first_call_that_is_interrupted_after_it_has_succeeded_leaves_no_trace(verb):
    class Interrupted(kvpool.Pool):
        def _connect(self, *args: Any) -> str:
            super()._connect(*args)
            raise KeyboardInterrupt

        def _listen(self, address: str) -> str:
            super()._listen(address)
            raise KeyboardInterrupt

    with small_pool(name="other") as other, Interrupted(small_layout(), hbm_blocks=2) as pool:
        where = other.peers.listen(address_of("shm"))
        with pytest.raises(KeyboardInterrupt):
            getattr(pool.peers, verb)(where if verb == "connect" else address_of("shm"))
        assert pool.peers.name is None
        # The peer has seen an instance id. The pool has none: another connect, or a directory, gives it one.
        assert kvpool.decode_address(int(pool.alloc(1)[0])).instance == 0
        pool.__class__ = kvpool.Pool
        assert pool.peers.connect(where) == "other"
        assert kvpool.decode_address(int(pool.alloc(1)[0])).instance != 0


def test_a_first_call_that_fails_leaves_another_one_of_the_same_pool_alone():
    for round_ in range(10):
        with small_pool(name="a") as pool, small_pool(name="b") as other, ThreadPoolExecutor(4) as threads:
            where = other.peers.listen(address_of("shm"))
            failing = [threads.submit(pool.peers.connect, address_of("shm"), wait=False) for _ in range(round_ % 4)]
            met = threads.submit(pool.peers.connect, where, timeout=60)
            assert met.result() == "b"
            for one in failing:
                assert isinstance(one.exception(), kvpool.PeerLost)
            assert [peer.name for peer in pool.peers.list()] == ["b"]
            pool.transfer("b", pool.alloc(1)).wait(60)


def test_failed_connects_leave_nothing():
    run_script("""
import os
from transfer.kit import *
def things():
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
with small_pool() as pool:
    before = things()
    for _ in range(20):
        try:
            pool.peers.connect(address_of("shm"), wait=False)
        except kvpool.PeerLost:
            pass
    # A thread that was joined may still be on its way out.
    eventually(lambda: all(now <= then for now, then in zip(things(), before)))
""")


def test_no_error_shows_the_secret():
    script = """
import dataclasses, types
from transfer.kit import *
pool = small_pool(secret="hush-hush")
wrong = dataclasses.asdict(pool.settings) | {"model": "\\udc80"}  # no UTF-8, so nothing that the core can take
try:
    pool._start_service(types.SimpleNamespace(**wrong), "wheel", "wheel")
except TypeError as error:
    assert "model" in str(error), error
    print(error)
"""
    run = run_script(script)
    assert "model" in run.stdout
    assert "hush" not in run.stdout + run.stderr


def test_an_application_that_does_not_answer_is_not_waited_for(tmp_path):
    import socket

    path = str(tmp_path / "silent")
    with socket.socket(socket.AF_UNIX) as silent, small_pool() as pool:
        silent.bind(path)
        silent.listen()
        with pytest.raises(TimeoutError) as caught:
            pool.peers.connect(f"unix:{path}", timeout=0.2)
        assert type(caught.value) is kvpool.DeadlineExceeded
