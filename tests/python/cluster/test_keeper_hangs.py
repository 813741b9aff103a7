"""A keeper of a lease that does nothing any more: stopped in these tests, as one that hangs."""

from __future__ import annotations

import subprocess
import threading

import pytest
from cluster.kit import EtcdPlace, wait_for
from kit import small_pool
from transfer.kit import stop_process

import kvpool


@pytest.fixture
def place(etcd_server):
    one = EtcdPlace(etcd_server, secret="s")
    yield one
    one.close()


@pytest.fixture
def no_process(monkeypatch):
    """Nobody can start a process, until this is called."""
    popen = subprocess.Popen

    def refuse(*arguments, **options):
        raise BlockingIOError(11, "no more processes")

    def begin():
        monkeypatch.setattr(subprocess, "Popen", refuse)
        return lambda: monkeypatch.setattr(subprocess, "Popen", popen)

    return begin


def hang(keeper):
    """Once it has done something, so that it is known by when it should do so again."""
    until = keeper.valid_until_ns
    wait_for(lambda: keeper.valid_until_ns > until)
    stop_process(keeper.pid)


def test_a_keeper_that_hangs_is_replaced(place):
    reg = place.register(place.join(), "a")
    words = []
    reg.on_lease(words.append)
    keeper = reg._entry.keeper
    first = keeper.pid
    hang(keeper)
    wait_for(lambda: keeper.pid != first)
    until = keeper.valid_until_ns
    wait_for(lambda: keeper.valid_until_ns > until)
    wait_for(reg.lease_valid)
    assert words in ([], ["lost", "regained"])  # whether the lease could be saved is the machine's business


def test_one_whose_keeper_hangs_and_cannot_be_replaced_fences_itself(place, no_process):
    """Nobody else would tell it: etcd is asked by the keeper alone."""
    reg = place.register(place.join(), "a")
    words = []
    reg.on_lease(words.append)
    let_go = no_process()
    hang(reg._entry.keeper)
    wait_for(lambda: words == ["lost"])
    assert not reg.lease_valid()
    assert reg.leases_lost == 1
    let_go()
    wait_for(lambda: words[:2] == ["lost", "regained"])
    assert reg.record.term == 1


def test_an_etcd_that_does_not_answer_is_no_keeper_that_hangs(own_etcd):
    """The keeper asks again and again, so it is well; and nobody can be told anything."""
    place = EtcdPlace(own_etcd)
    try:
        reg = place.register(place.join(), "a")
        words = []
        reg.on_lease(words.append)
        keeper = reg._entry.keeper
        own_etcd.kill()
        wait_for(lambda: not reg.lease_valid())
        failed = reg.renewals_failed
        wait_for(lambda: reg.renewals_failed > failed + 8)  # which takes a lease, and more
        assert keeper.silent_s() < 1.0
        assert not reg.lapsed()
        assert words == []
    finally:
        place.close()


def test_a_pool_is_fenced_by_the_clock_while_the_clusters_thread_is_held_up(place, monkeypatch):
    with place.join() as one, place.join() as two, small_pool() as here, small_pool() as there:
        here.attach(one, name="here")
        there.attach(two, name="there")
        one.wait_for(n=2)
        addrs = here.alloc(1)

        def send():
            here.transfer("there", addrs).wait()
            while item := there.received(0):
                item.close()

        send()
        entry = here._attachment._registration._entry
        hold, goes_on, is_held_up = entry.hold, threading.Event(), threading.Event()

        def held_up():
            is_held_up.set()
            goes_on.wait(120)
            return hold()

        monkeypatch.setattr(entry, "hold", held_up)
        assert is_held_up.wait(60)
        hang(entry.keeper)
        try:

            def fenced():
                try:
                    send()
                except kvpool.Fenced:
                    return True
                except kvpool.Error:  # the other one was told first, and has parted
                    return False
                return False

            wait_for(fenced)
            assert here.peers() == []
        finally:
            goes_on.set()

        def sent():
            try:
                send()
            except kvpool.Error:
                return False
            return True

        wait_for(sent)
        assert here._attachment._registration.record.term == 1
