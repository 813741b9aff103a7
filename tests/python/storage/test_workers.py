"""The threads of a Storage."""

from __future__ import annotations

import logging
import threading
import time

import kit
import pytest
from storage_kit import MemoryStore, content, files_of, joined_to, key, room

import kvpool
from kvpool.storage import DirectoryStore
from kvpool.storage import counting as counting_module
from kvpool.storage.counting import Seldom
from kvpool.storage.workers import Alarm, ReadsFirst, Workers

LONG_S = 60.0


def soon() -> float:
    return time.monotonic() + LONG_S


def never() -> None:
    raise AssertionError("was dropped")


def test_jobs_run_on_no_more_threads_than_were_asked_for():
    workers = Workers("test", 3, 1000)
    running, most, lock = set(), [], threading.Lock()

    def job():
        with lock:
            running.add(threading.get_ident())
            most.append(len(running))
        time.sleep(0.001)
        with lock:
            running.discard(threading.get_ident())

    for _ in range(60):
        assert workers.submit(job, never)
    assert workers.wait_idle(soon())
    assert workers.close(soon())
    assert len(most) == 60
    assert 2 <= max(most) <= 3
    assert not workers.submit(job, never)


def test_what_waits_is_bounded_by_its_weight():
    workers, gate = Workers("test", 1, 10), threading.Event()
    begun = threading.Event()
    assert workers.submit(lambda: (begun.set(), gate.wait(LONG_S)), never)
    assert begun.wait(LONG_S)
    ran = []
    assert workers.submit(lambda: ran.append(1), never, weight=50)  # alone
    assert not workers.submit(lambda: ran.append(2), never, weight=1)
    gate.set()
    assert workers.wait_idle(soon())
    assert workers.submit(lambda: ran.append(3), never, weight=10)
    assert workers.wait_idle(soon())
    assert ran == [1, 3]
    workers.close(soon())


def test_what_waits_at_the_end_is_dropped_and_a_job_that_hangs_is_left_behind():
    workers, gate, begun, dropped = Workers("test", 1, 10), threading.Event(), threading.Event(), []
    workers.submit(lambda: (begun.set(), gate.wait(LONG_S)), never)
    assert begun.wait(LONG_S)
    workers.submit(never, lambda: dropped.append(1))
    assert not workers.close(time.monotonic() + 0.05)
    assert dropped == [1]
    gate.set()
    assert workers.close(soon())


def test_a_job_that_fails_by_a_bug_is_logged_and_the_thread_goes_on(caplog):
    workers, ran = Workers("test", 1, 10), []
    with caplog.at_level(logging.ERROR, "kvpool.storage"):
        workers.submit(never, never)
        workers.submit(lambda: ran.append(1), never)
        assert workers.wait_idle(soon())
    assert ran == [1]
    assert len(caplog.records) == 1
    workers.close(soon())


def test_an_alarm_calls_in_order_and_at_once_when_it_is_closed():
    alarm, heard, both = Alarm("test"), [], threading.Event()
    now = time.monotonic()
    alarm.at(now + 1000, lambda: heard.append("late"))
    alarm.at(now + 0.02, lambda: (heard.append("second"), both.set()))
    alarm.at(now + 0.01, lambda: heard.append("first"))
    assert both.wait(LONG_S)
    assert heard == ["first", "second"]
    alarm.close()
    assert heard == ["first", "second", "late"]


def test_an_alarm_that_is_closed_calls_at_once_in_the_callers_thread():
    alarm, heard = Alarm("test"), []
    alarm.at(time.monotonic(), lambda: None)
    alarm.close()
    alarm.at(time.monotonic() + 1000, lambda: heard.append(threading.get_ident()))
    assert heard == [threading.get_ident()]


def no_threads(monkeypatch, name):
    """As at a limit of the process."""
    start = threading.Thread.start

    def fails(thread):
        if thread.name.startswith(name):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fails)


def test_a_job_for_which_there_can_be_no_thread_is_refused(monkeypatch):
    workers, ran = Workers("test", 2, 10), threading.Event()
    with monkeypatch.context() as patch:
        no_threads(patch, "test")
        assert not workers.submit(never, never)
        assert workers.wait_idle(soon())
    assert workers.submit(ran.set, never)
    assert ran.wait(LONG_S)
    assert workers.close(soon())


def test_an_alarm_that_can_have_no_thread_calls_at_once(monkeypatch):
    alarm, heard = Alarm("test"), []
    with monkeypatch.context() as patch:
        no_threads(patch, "test")
        alarm.at(time.monotonic() + 1000, lambda: heard.append(1))
    assert heard == [1]
    alarm.close()


def test_a_load_and_a_save_without_threads_end(monkeypatch):
    with kit.small_pool(0, 4, device="cpu") as pool, joined_to(pool, MemoryStore()) as storage:
        kit.store(pool, kit.prompt(1), medium=kvpool.DRAM)
        with monkeypatch.context() as patch:
            no_threads(patch, "kvpool-storage")
            assert storage.load(kit.prompt(2)).wait(LONG_S).late
            with pytest.raises(kvpool.StoreFailed):
                storage.save(kit.prompt(1)).wait(LONG_S)
        assert pool.stats().dram.pinned == 0
        assert storage.save(kit.prompt(1)).wait(LONG_S).saved == 1


def test_writers_wait_until_the_last_read_has_ended():
    reads = ReadsFirst()
    assert reads.wait(time.monotonic())
    reads.begin()
    reads.begin()
    reads.end()
    assert not reads.wait(time.monotonic() + 0.01)
    reads.end()
    assert reads.wait(time.monotonic())


def test_a_message_comes_once_in_a_while_and_says_how_often(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(counting_module.time, "monotonic", lambda: now[0])
    seldom = Seldom()
    assert [seldom.due() for _ in range(4)] == [1, 0, 0, 0]
    assert seldom.due(at_once=True) == 4
    assert seldom.due() == 0
    now[0] += 31
    assert seldom.due() == 2


def test_a_folder_of_damaged_files_is_one_message(tmp_path, caplog):
    with DirectoryStore(tmp_path / "s") as store, caplog.at_level(logging.WARNING, "kvpool.storage"):
        numbers = range(20)
        store.put([key(number) for number in numbers], [content(number) for number in numbers])
        for file in files_of(store):
            file.write_bytes(b"torn")
        assert store.get([key(number) for number in numbers], [room() for _ in numbers]) == [False] * 20
        assert store.stats().torn == 20
        assert len(caplog.records) == 1
