"""Calls that must not wait forever: closing a cluster, or a pool's membership, from the middle of anything.

The garbage collector runs finalizers, and the interpreter handlers of signals, in whatever thread, while that has
locks. Here the same calls are made just there.
A call that waits gives up after a minute (waiting/threads.py), and fails.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from attach_kit import eventually, join, member, names, url
from kit import ctrl_c_works, refused, small_pool

import kvpool
from kvpool import Fenced
from kvpool.waiting import threads as waiting

__all__ = ["url"]

HUNG = 30.0  # less than the minute after which waiting/threads.py gives up


class Once:
    """Does something at its first call."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self.took: float | None = None

    def __call__(self) -> None:
        if self.took is None:
            self.took = 0.0
            begin = time.monotonic()
            self._work()
            self.took = time.monotonic() - begin


class Garbage:
    """An object that only the garbage collector finds, with a finalizer that closes something, as an engine's may."""

    def __init__(self, close: Callable[[], object]) -> None:
        self._close = close
        self._cycle = self

    def __del__(self) -> None:
        self._close()


def drop(close: Callable[[], object]) -> None:
    Garbage(close)


class Interrupted:
    """A lock that runs something in its holder, between acquiring and releasing it."""

    def __init__(self, lock: Any, happens: Callable[[], object]) -> None:
        self._lock, self._happens = lock, happens

    def __enter__(self) -> None:
        self._lock.acquire()
        self._happens()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Wanted:
    """A lock that reports which thread is about to wait for it."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self.by: set[str] = set()

    def acquire(self) -> bool:
        self.by.add(threading.current_thread().name)
        return self._lock.acquire()

    def release(self) -> None:
        self._lock.release()

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()


@pytest.fixture(params=["kvpool-members", "kvpool-attach"])
def thread_with_the_table(request):
    return request.param


@pytest.mark.parametrize("what", ["cluster", "attachment"])
def test_a_finalizer_in_a_thread_that_holds_the_table_of_members_does_not_wait(url, thread_with_the_table, what):
    """While the cluster's own thread, which paints the view, waits for that table."""
    with join(url) as watching, member(url, "a") as (a, cluster, attachment):
        eventually(lambda: names(watching) == ["a"])
        closing = cluster if what == "cluster" else attachment
        table, wanted = attachment._members, Wanted(attachment._members._lock)
        late = join(url)

        def close_when_the_view_waits() -> None:
            wanted.by.clear()
            late.register(name="late", role="both", incarnation=7)
            eventually(lambda: "kvpool-cluster" in wanted.by)
            drop(closing.close)
            gc.collect()

        once = Once(close_when_the_view_waits)

        def happens() -> None:
            if threading.current_thread().name == thread_with_the_table:
                once()

        table._lock = Interrupted(wanted, happens)
        with join(url) as other:
            other.register(name="b", role="both", incarnation=8)  # which the members' thread receives
            eventually(lambda: once.took)
            assert once.took < HUNG
            eventually(lambda: "a" not in names(watching))
            closing.close()  # here it is waited for
            with refused(a, Fenced, "has left its cluster"):
                a.alloc(1, instance="b")
            assert not attachment._watch._thread.is_alive()
        late.close()
    assert not cluster._loop._thread.is_alive()


def test_callbacks_that_close_their_cluster_at_once_do_not_wait_for_each_other(url):
    with join(url) as watching, join(url) as cluster:
        cluster.register(name="a", role="both", incarnation=1)
        eventually(lambda: names(watching) == ["a"])
        together, took = threading.Barrier(3), []

        def close(event: kvpool.MemberEvent) -> None:
            together.wait(60)
            begin = time.monotonic()
            cluster.close()
            took.append(time.monotonic() - begin)

        handles = [cluster.on_change(close) for _ in range(3)]
        eventually(lambda: len(took) == 3)
        assert max(took) < HUNG
        eventually(lambda: names(watching) == [])
        cluster.close()
        assert not any(handle._thread.is_alive() for handle in handles)


def test_callbacks_that_close_each_other_at_once_do_not_wait_for_each_other(url):
    with join(url) as one, join(url) as two:
        together, took, handles = threading.Barrier(3), [], []

        def close(event: kvpool.MemberEvent, other: int) -> None:
            together.wait(60)
            begin = time.monotonic()
            handles[other].close()
            took.append(time.monotonic() - begin)

        handles += [
            one.on_change(lambda event: close(event, 1)),
            two.on_change(lambda event: close(event, 0)),
        ]
        with join(url) as cluster:
            cluster.register(name="a", role="both", incarnation=1)
            together.wait(60)
            eventually(lambda: len(took) == 2)
        assert max(took) < HUNG
        for handle in handles:
            handle.close()
            assert not handle._thread.is_alive()


def test_callbacks_of_a_pool_that_close_it_at_once_do_not_wait_for_each_other(url):
    with member(url, "a") as (a, *_), member(url, "b") as (b, *_):
        together, took = threading.Barrier(2), []

        def close(_: object) -> None:
            together.wait(60)
            begin = time.monotonic()
            b.close()
            took.append(time.monotonic() - begin)

        handles = [b.inbox.on_received(close), b.peers.on_change(close)]
        eventually(lambda: "b" in a._attachment._members.names())
        a.transfer("b", a.alloc(1))
        eventually(lambda: len(took) == 2)
        assert max(took) < HUNG
        b.close()
        eventually(lambda: not any(handle._thread.is_alive() for handle in handles))


class OfTheView(dict):
    """The view's members: the first reader, which holds the lock of the view, is interrupted."""

    def __init__(self, members: dict[str, kvpool.Member], happens: Callable[[], object]) -> None:
        super().__init__(members)
        self._once = Once(happens)

    def __iter__(self):
        self._once()
        return super().__iter__()


def by_signal(close: Callable[[], object]) -> None:
    """As a handler of SIGTERM does it."""
    before = signal.signal(signal.SIGUSR1, lambda *_: close())
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0)  # a handler runs between two instructions
    finally:
        signal.signal(signal.SIGUSR1, before)


def by_collection(close: Callable[[], object]) -> None:
    drop(close)
    gc.collect()


@pytest.mark.parametrize("how", [by_signal, by_collection])
def test_closing_while_the_members_are_read_does_not_wait(url, how):
    with join(url) as watching, member(url, "a") as (a, cluster, attachment):
        eventually(lambda: names(watching) == ["a"])
        took: list[float] = []

        def close() -> None:
            begin = time.monotonic()
            a.close()
            cluster.close()
            took.append(time.monotonic() - begin)

        view = cluster._view
        with view._changed:
            view._members = OfTheView(view._members, lambda: how(close))
        cluster.members()
        assert attachment.closed
        assert took[0] < HUNG
        eventually(lambda: names(watching) == [])
        cluster.close()
        assert not cluster._loop._thread.is_alive()


def test_a_finalizer_under_a_lock_that_a_callback_wants_does_not_wait(url):
    """A lock of the application: a finalizer does not know that its thread has it."""
    with join(url) as cluster:
        lock, heard = threading.Lock(), threading.Event()

        def hear(event: kvpool.MemberEvent) -> None:
            heard.set()
            with lock:
                pass

        with lock:
            handle = cluster.on_change(hear)
            cluster.register(name="a", role="both", incarnation=1)
            assert heard.wait(60)
            begin = time.monotonic()
            drop(cluster.close)
            gc.collect()
            assert time.monotonic() - begin < HUNG
            assert cluster.closed
        cluster.close()
        assert not handle._thread.is_alive()


def test_a_cluster_that_is_closed_while_it_registers_has_no_member(url, monkeypatch):
    """In the middle of the very call that has the lock which its end needs."""
    with join(url) as watching:
        cluster = join(url)
        enter = cluster._directory.enter

        def enter_and_close(record: kvpool.Member, timeout_s: float) -> object:
            by_signal(cluster.close)
            return enter(record, timeout_s)

        monkeypatch.setattr(cluster._directory, "enter", enter_and_close)
        with small_pool() as pool:
            with pytest.raises(kvpool.ClosedError):
                pool.attach(cluster, name="a")
            assert pool.peers.name is None
        cluster.close()
        assert not cluster._loop._thread.is_alive()
        eventually(lambda: names(watching) == [])


def test_a_state_that_a_signal_handler_publishes_is_not_lost(url):
    """SIGTERM drains, in the thread that is just publishing something else."""
    with join(url) as watching, join(url) as cluster:
        reg = cluster.register(name="a", role="both", incarnation=1)

        interrupt = Once(lambda: by_signal(lambda: reg.publish(state="draining")))

        class Endpoints(list):
            def __len__(self) -> int:
                interrupt()
                return super().__len__()

        reg.publish(endpoints=Endpoints(["unix:@a"]))
        assert interrupt.took is not None
        eventually(lambda: [(m.state, m.endpoints) for m in watching.members()] == [("draining", ("unix:@a",))])


def test_a_cluster_that_is_dropped_ends_its_callbacks(url):
    cluster = join(url)
    thread = cluster.on_change(lambda event: None)._thread
    del cluster
    gc.collect()
    eventually(lambda: not thread.is_alive())


def test_may_wait_is_false_under_a_lock_and_in_a_finalizer():
    assert waiting.may_wait()
    with waiting.busy, waiting.busy:
        assert not waiting.may_wait()
    told: list[bool] = []
    drop(lambda: told.append(waiting.may_wait()))
    gc.collect()
    assert told == [False]
    assert waiting.may_wait()
    elsewhere = threading.Thread(target=lambda: told.append(waiting.may_wait()))
    with waiting.busy:
        elsewhere.start()
        elsewhere.join()
    assert told == [False, True]


def test_ctrl_c_is_not_lost_when_a_collection_comes_first():
    """A signal is handled where Python runs next: in a callback of the collector its exception would be dropped."""
    raise_signal = getattr(ctypes.CDLL(None), "raise")  # unlike Python's own it does not handle the signal
    steps = [functools.partial(raise_signal, signal.SIGINT), functools.partial(gc.collect)]
    callbacks = gc.callbacks[:]
    gc.collect()  # so that no finalizer is left to run
    with ctrl_c_works():
        gc.callbacks[:] = [each for each in callbacks if each.__module__.startswith("kvpool.")]
        try:
            assert gc.callbacks
            with pytest.raises(KeyboardInterrupt):
                collections.deque(map(functools.partial.__call__, steps), maxlen=0)  # no Python between the two
        finally:
            gc.callbacks[:] = callbacks
    assert waiting.may_wait()


def test_a_child_that_is_forked_in_the_middle_may_wait():
    with waiting.busy:
        child = os.fork()
        if child == 0:
            os._exit(0 if waiting.may_wait() else 1)
    assert os.waitpid(child, 0)[1] == 0
