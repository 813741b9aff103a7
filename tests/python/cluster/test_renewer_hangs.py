"""A lease renewer that hangs. These tests stop it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading

import pytest
from cluster.kit import EtcdPlace, wait_for
from kit import small_pool
from transfer.kit import stop_process

import kvpool
from kvpool.cluster.etcd import renewer_process
from kvpool.cluster.etcd.renewer_process import RenewerProcess
from kvpool.peers.attachment import Attachment


@pytest.fixture
def place(etcd_server):
    one = EtcdPlace(etcd_server)
    yield one
    one.close()


@pytest.fixture
def no_process(monkeypatch):
    """No process can be started until this is called."""
    popen = subprocess.Popen

    def refuse(*arguments, **options):
        raise BlockingIOError(11, "no more processes")

    def begin():
        monkeypatch.setattr(subprocess, "Popen", refuse)
        return lambda: monkeypatch.setattr(subprocess, "Popen", popen)

    return begin


def hang(renewer):
    """Once it has done something, so that it is known by when it should do so again."""
    until = renewer.valid_until_ns
    wait_for(lambda: renewer.valid_until_ns > until)
    stop_process(renewer.pid)


def test_a_renewer_that_hangs_is_replaced(place):
    reg = place.register(place.join(), "a")
    words = []
    reg.on_lease(words.append)
    renewer = reg._entry.renewer
    first = renewer.pid
    hang(renewer)
    wait_for(lambda: renewer.pid != first)
    until = renewer.valid_until_ns
    wait_for(lambda: renewer.valid_until_ns > until)
    wait_for(reg.lease_valid)
    assert set(words) <= {"lost", "regained"}  # whether the lease could be saved is the machine's business


def test_a_renewer_that_wakes_while_it_is_replaced_does_not_revoke_the_lease(place, monkeypatch):
    """It is hung up on, which means the end of the member to it: so it must be dead by then."""
    reg = place.register(place.join(), "a")
    hang_up, ended = renewer_process._hang_up, []

    def wakes(process):
        if process.poll() is None:
            os.kill(process.pid, signal.SIGCONT)
        hang_up(process)
        ended.append(process.wait(60))

    monkeypatch.setattr(renewer_process, "_hang_up", wakes)
    hang(reg._entry.renewer)
    wait_for(lambda: ended)
    assert ended[0] == -signal.SIGKILL


def test_a_pool_fenced_by_the_clock_is_told_so_even_when_etcd_has_forgotten_everything(place, monkeypatch):
    """ "lost" and "regained" let it out of its fence; a member that enters again in silence would stay in it."""
    reg = place.register(place.join(), "a")
    words, entry = [], reg._entry
    reg.on_lease(words.append)
    with reg._entry_lock:  # the cluster's thread is just entering it again
        monkeypatch.setattr(RenewerProcess, "valid_until_ns", 0)
        monkeypatch.setattr(RenewerProcess, "silent_s", lambda renewer: 1000.0)
        assert entry.lapsed()
        monkeypatch.undo()
        assert entry.enter_again(reg.record, lost=False) == 0
        assert entry.check_lease() == "lost"
    wait_for(lambda: words[:2] == ["lost", "regained"])
    wait_for(lambda: not entry.lapsed())


def test_the_thread_that_reads_the_clock_survives_errors(place, monkeypatch):
    publish, tried = Attachment._publish_load, []

    def fails_once(attachment):
        tried.append(attachment.name)
        if len(tried) == 1:
            raise RuntimeError("the test")
        return publish(attachment)

    monkeypatch.setattr(Attachment, "_publish_load", fails_once)
    with place.join() as cluster, small_pool(secret="s") as pool:
        pool.attach(cluster, name="a")
        wait_for(lambda: len(tried) > 2)


def test_a_member_whose_renewer_hangs_and_cannot_be_replaced_fences_itself(place, no_process):
    """It would not learn it otherwise: only the renewer asks etcd."""
    reg = place.register(place.join(), "a")
    words = []
    reg.on_lease(words.append)
    let_go = no_process()
    hang(reg._entry.renewer)
    wait_for(lambda: words == ["lost"])
    assert not reg.lease_valid()
    assert reg.leases_lost == 1
    let_go()
    wait_for(lambda: words[:2] == ["lost", "regained"])
    assert reg.record.term >= 1


def test_an_etcd_that_does_not_answer_is_not_taken_for_a_hanging_renewer(own, own_etcd):
    """The renewer asks again and again, so it is well; and no member can be told anything."""
    reg = own.register(own.join(), "a")
    words = []
    reg.on_lease(words.append)
    renewer = reg._entry.renewer
    own_etcd.kill()
    wait_for(lambda: not reg.lease_valid())
    failed = reg.renewals_failed
    wait_for(lambda: reg.renewals_failed > failed + 8)  # which takes a lease, and more
    wait_for(lambda: renewer.silent_s() == 0.0)  # a hanging one stays late
    assert not reg.lapsed()
    assert words == []


def test_a_pool_is_fenced_by_the_clock_while_the_clusters_thread_is_held_up(place, monkeypatch):
    with place.join() as one, place.join() as two, small_pool(secret="s") as here, small_pool(secret="s") as there:
        here.attach(one, name="here")
        there.attach(two, name="there")
        one.wait_for(n=2)
        addrs = here.alloc(1)

        def send():
            here.transfer("there", addrs).wait()
            while item := there.inbox.receive(0):
                item.close()

        send()
        entry = here._attachment._registration._entry
        hold, goes_on, is_held_up = entry.check_lease, threading.Event(), threading.Event()

        def held_up():
            is_held_up.set()
            goes_on.wait(120)
            return hold()

        monkeypatch.setattr(entry, "check_lease", held_up)
        assert is_held_up.wait(60)
        hang(entry.renewer)
        try:

            def fenced():
                try:
                    send()
                except kvpool.Fenced:
                    return True
                except kvpool.Error:  # the other one was told first, and has disconnected
                    return False
                return False

            wait_for(fenced)
            wait_for(lambda: here.peers.list() == [])  # another thread closes the links
        finally:
            goes_on.set()

        def sent():
            try:
                send()
            except kvpool.Error:
                return False
            return True

        wait_for(sent)
        assert here._attachment._registration.record.term >= 1  # more, where a process takes a lease to start
