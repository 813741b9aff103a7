"""A store in a folder: what goes, by age and by size, and what dead writers left."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from pathlib import Path

import pytest
from storage_kit import content, files_of, joined, key, read, stored

from kvpool.storage import DirectoryStore
from kvpool.storage.block_file import HEADER_BYTES


def used_s_ago(file: Path, seconds: float) -> None:
    now = time.time()
    os.utime(file, (now - seconds, now - seconds))


def test_trim_removes_the_least_recently_used(store):
    ages = {}
    for number, age in ((1, 300), (2, 100), (3, 200), (4, 400)):
        ages[number] = stored(store, number)
        used_s_ago(ages[number], age)
    size = ages[1].stat().st_size
    done = store.trim(size_max=2 * size)
    assert (done.removed, done.removed_bytes, done.blocks, done.bytes) == (2, 2 * size, 2, 2 * size)
    assert store.exists([key(number) for number in (1, 2, 3, 4)]) == [False, True, True, False]
    assert store.trim(age_max_s=150).removed == 1
    assert store.exists([key(2), key(3)]) == [True, False]
    assert store.stats().deleted == 3


def test_a_read_counts_as_a_use(store):
    files = [stored(store, number) for number in (1, 2)]
    used_s_ago(files[0], 300)
    used_s_ago(files[1], 200)
    read(store, 1)
    store.trim(size_max=files[0].stat().st_size)
    assert store.exists([key(1), key(2)]) == [True, False]


def test_a_store_keeps_its_size_while_it_is_written_to(tmp_path):
    size = 1000 + HEADER_BYTES
    with DirectoryStore(tmp_path / "store", size_max=40 * size) as store:
        for number in range(400):
            store.put([key(number)], [content(number)])
            for file in files_of(store):  # each a second older than the next
                used_s_ago(file, time.time() - file.stat().st_mtime + 1)
            assert len(files_of(store)) <= 50  # a quarter more
        assert len(files_of(store)) >= 30
        assert store.exists([key(399), key(398), key(0)]) == [True, True, False]
        assert store.stats().deleted == 400 - len(files_of(store))


def test_a_store_drops_what_is_old_while_it_is_written_to(tmp_path):
    with DirectoryStore(tmp_path / "store", size_max=1 << 20, age_max_s=60) as store:
        used_s_ago(stored(store, 1), 100)
        kept = stored(store, 2)
        used_s_ago(kept, 30)
        for number in range(300, 500):
            store.put([key(number)], [content(number)])
        assert store.exists([key(1), key(2)]) == [False, True]


def test_what_a_dead_writer_left_is_removed_and_what_a_live_one_writes_is_not(store):
    folder = stored(store).parent
    dead, alive, young = (folder / f".{letter * 32}.new" for letter in "abc")
    strange = folder / "notes.txt"
    for file in (dead, alive, young, strange):
        file.write_bytes(b"x" * 500)
    used_s_ago(dead, 700)
    used_s_ago(alive, 1 << 20)  # of a host whose clock is far behind, or that writes very slowly
    with alive.open() as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        done = store.trim(size_max=1 << 30)
        assert (done.leftovers, done.blocks) == (1, 1)
        # Of a young one without a lock the writer may be on another host, which alone sees its lock.
        assert [file.exists() for file in (dead, alive, young, strange)] == [False, True, True, True]
    assert store.trim(size_max=1 << 30).leftovers == 1
    assert [file.exists() for file in (alive, young, strange)] == [False, True, True]


def test_without_locks_only_age_tells(store, monkeypatch):
    folder = stored(store).parent
    old, older = (folder / f".{letter * 32}.new" for letter in "ab")
    for file, age in ((old, 1800), (older, 7200)):
        file.write_bytes(b"x" * 500)
        used_s_ago(file, age)

    def unknown(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unknown)
    assert store.trim().leftovers == 1
    assert (old.exists(), older.exists()) == (True, False)


@pytest.mark.parametrize("days", [8, -8])
def test_a_host_whose_clock_is_wrong_removes_nothing_that_was_used_just_now(tmp_path, monkeypatch, days):
    """By the clock of the file system, which all hosts share."""
    with DirectoryStore(tmp_path / "s", age_max_s=7 * 86400) as where:
        old = stored(where, 1)
        used_s_ago(old, 7.5 * 86400)
        for number in range(2, 40):
            stored(where, number)
        right = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: right() + days * 86400 * 10**9)
        with DirectoryStore(where.path, age_max_s=7 * 86400) as wrong:
            for number in range(40, 140):  # by the sweep
                wrong.put([key(number)], [content(number)])
            assert wrong.trim().blocks == 138
        assert not old.exists()


def test_a_folder_that_belongs_to_another_user_is_swept_as_well(tmp_path, monkeypatch):
    """Of root, say, with write access for a group."""
    status = os.fstat

    def of_another(descriptor):
        found = status(descriptor)
        if stat.S_ISDIR(found.st_mode):
            return os.stat_result((*found[:4], found.st_uid + 1, *found[5:]))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", of_another)
        store = DirectoryStore(tmp_path / "s")
    with store:
        file = stored(store)
        assert store.delete([key(1)]) == 1
        assert not file.exists()


def test_a_writer_whose_file_was_taken_for_a_leftover_writes_again(store, monkeypatch):
    rename, taken = os.rename, []

    def late(name, *arguments, **options):
        if not taken:
            taken.append(name)
            os.unlink(name, dir_fd=options["src_dir_fd"])
        rename(name, *arguments, **options)

    monkeypatch.setattr(os, "rename", late)
    stored(store)
    assert taken
    assert read(store, 1) == joined(content(1))
