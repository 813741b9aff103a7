"""A store in a folder: whole blocks or misses, whatever lies there."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import stat
import threading
import time
from pathlib import Path

import pytest
from storage_kit import content, files_of, joined, key, leftovers_of, read, room, stored

import kvpool
from kvpool.storage import DirectoryStore, folders
from kvpool.storage import directory as directory_module


def test_what_was_put_is_read_back(store):
    assert store.exists([key(1), key(2)]) == [False, False]
    assert store.put([key(1), key(2)], [content(1), content(2)]) == 2
    assert store.exists([key(1), key(3), key(2)]) == [True, False, True]
    assert read(store, 1) == joined(content(1))
    assert read(store, 2) == joined(content(2))
    assert read(store, 3) is None
    stats = store.stats()
    assert (stats.written, stats.written_bytes, stats.hits, stats.read_bytes, stats.misses) == (2, 2000, 2, 2000, 1)


@pytest.mark.parametrize(("written", "wanted"), [(1, 1), (1, 3), (7, 1), (1500, 2), (3, 1500)])
def test_pieces_are_no_part_of_the_content(store, written, wanted):
    """Also more of them than one system call takes."""
    store.put([key(1)], [content(1, 3000, written)])
    assert read(store, 1, 3000, wanted) == joined(content(1, 3000))


def test_a_block_without_content_is_not_taken_for_one(store):
    store.put([key(1)], [[]])
    assert store.exists([key(1)]) == [False]


def test_what_is_there_is_not_written_again(store):
    file = stored(store)
    before = file.stat()
    assert store.put([key(1)], [content(1)]) == 0
    assert file.stat().st_ino == before.st_ino
    assert store.stats().present == 1


def test_deleted_blocks_are_gone(store):
    store.put([key(1), key(2)], [content(1), content(2)])
    assert store.delete([key(1), key(7)]) == 1
    assert store.exists([key(1), key(2)]) == [False, True]


def test_files_are_for_their_owner_alone(store):
    before = os.umask(0)
    try:
        file = stored(store)
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(Path(store.path).stat().st_mode) == 0o700
    assert file.parent.name == file.name[:2]  # one of 256 folders


def test_two_stores_share_a_folder(tmp_path, store):
    stored(store)
    with DirectoryStore(store.path) as other:
        assert read(other, 1) == joined(content(1))
        other.delete([key(1)])
    assert read(store, 1) is None


# ---- writing


def test_a_reader_never_sees_half_a_block(store, monkeypatch):
    """While its bytes are being written, nothing has the block's name."""
    seen = []
    write = os.pwritev

    def looking(*arguments):
        seen.append((store.exists([key(1)]), len(leftovers_of(store))))
        return write(*arguments)

    monkeypatch.setattr(os, "pwritev", looking)
    stored(store)
    assert seen == [([False], 1)]
    assert leftovers_of(store) == []


def test_writes_and_reads_that_do_less_than_asked_go_on(store, monkeypatch):
    read_some, write_some = os.preadv, os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda f, b, at: write_some(f, [b[0][:7]], at))
    monkeypatch.setattr(os, "preadv", lambda f, b, at: read_some(f, [b[0][:5]], at))
    stored(store)
    assert read(store, 1) == joined(content(1))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_a_refused_write_makes_the_store_read_only_for_a_while(store, monkeypatch, caplog, number):
    stored(store, 1)
    write = os.pwritev

    def full(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwritev", full)
    with caplog.at_level(logging.WARNING, "kvpool.storage"):
        for _ in range(3):
            with pytest.raises(kvpool.StoreFailed) as caught:
                store.put([key(2)], [content(2)])
            assert caught.value.errno == number
    assert len(caplog.records) == 1
    assert store.stats().read_only
    assert store.stats().failed_writes == 1  # the others were not tried
    assert leftovers_of(store) == []
    assert read(store, 1) == joined(content(1))  # reading goes on
    monkeypatch.setattr(os, "pwritev", write)
    monkeypatch.setattr(store, "_read_only_until", time.monotonic())
    assert store.put([key(2)], [content(2)]) == 1
    assert not store.stats().read_only


def test_what_a_file_system_reports_at_the_end_is_not_missed(store, monkeypatch):
    """NFS says only then that the server had no room."""
    close, duplicates = os.close, []
    duplicate = os.dup

    def noted(descriptor):
        duplicates.append(duplicate(descriptor))
        return duplicates[-1]

    def full(descriptor):
        close(descriptor)
        if descriptor in duplicates:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "dup", noted)
    monkeypatch.setattr(os, "close", full)
    with pytest.raises(kvpool.StoreFailed, match="quota"):
        store.put([key(1)], [content(1)])
    assert (files_of(store), leftovers_of(store)) == ([], [])


def test_threads_that_write_the_same_block_do_not_disturb_each_other(store):
    def write():
        for number in range(50):
            store.put([key(number)], [content(number)])

    threads = [threading.Thread(target=write) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert [read(store, number) for number in range(50)] == [joined(content(number)) for number in range(50)]
    assert leftovers_of(store) == []


# ---- the folder itself


def test_a_folder_with_other_files_is_refused_and_unchanged(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(kvpool.StateError, match=r"thesis\.tex"):
        DirectoryStore(tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_store_of_another_version_is_refused(tmp_path):
    DirectoryStore(tmp_path).close()
    (tmp_path / "kvpool-store").write_text("kvpool store 9\n")
    with pytest.raises(kvpool.StateError, match="store 9"):
        DirectoryStore(tmp_path)


def test_a_folder_that_another_process_is_making_is_no_foreign_one(tmp_path):
    (tmp_path / f".{'c' * 32}.new").write_bytes(b"kvpool st")
    DirectoryStore(tmp_path).close()


def test_a_mark_that_a_loss_of_power_has_emptied_is_written_again(tmp_path):
    DirectoryStore(tmp_path).close()
    (tmp_path / "00").mkdir(exist_ok=True)
    (tmp_path / "kvpool-store").write_bytes(b"")
    DirectoryStore(tmp_path).close()
    assert (tmp_path / "kvpool-store").read_bytes() == b"kvpool store 1\n"


def test_the_mark_is_flushed_before_blocks_rely_on_it(tmp_path, monkeypatch):
    flushed, flush = [], os.fsync

    def noted(descriptor):
        flushed.append(os.fstat(descriptor).st_mode)
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    DirectoryStore(tmp_path / "s").close()
    assert [stat.S_ISREG(flushed[0]), stat.S_ISDIR(flushed[1])] == [True, True]
    DirectoryStore(tmp_path / "s").close()
    assert len(flushed) == 2


def test_the_root_of_a_new_file_system_can_be_a_store(tmp_path):
    (tmp_path / "lost+found").mkdir()
    with DirectoryStore(tmp_path) as store:
        assert store.put([key(1)], [content(1)]) == 1


def test_a_folder_that_was_removed_and_made_again_is_used_again(tmp_path):
    with DirectoryStore(tmp_path / "s") as store:
        stored(store)
        shutil.rmtree(store.path)
        assert store.exists([key(1)]) == [False]
        with pytest.raises(kvpool.StoreFailed):
            store.put([key(1)], [content(1)])
        store._read_only_until = 0.0  # as after half a minute
        with DirectoryStore(store.path) as other:
            other.put([key(2)], [content(2)])
        assert store.exists([key(1), key(2)]) == [False, True]
        assert store.put([key(1)], [content(1)]) == 1
        assert read(store, 2) == joined(content(2))


def test_what_another_made_at_the_path_is_not_taken_for_the_store(tmp_path):
    with DirectoryStore(tmp_path / "s") as store:
        shutil.rmtree(store.path)
        Path(store.path).mkdir()
        with pytest.raises(kvpool.StoreFailed):
            store.put([key(1)], [content(1)])
        assert os.listdir(store.path) == []


def test_a_forked_child_cannot_use_it(store):
    """A thread of the parent may have had its lock."""
    with store._lock:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                store.close()
                store.exists([key(1)])
            except kvpool.ForkError:
                code = 0
            finally:
                os._exit(code)
    until = time.monotonic() + 60
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < until:
        time.sleep(0.01)
    if ended[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(ended[1]) == 0
    assert ended[0] == child


def test_a_path_that_is_no_folder_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(kvpool.StoreFailed):
        DirectoryStore(tmp_path / "file")
    with pytest.raises(kvpool.ArgumentError):
        DirectoryStore("a\0b")


def test_a_closed_store_refuses_every_call_and_leaves_no_descriptor(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    store = DirectoryStore(tmp_path / "store")
    stored(store)
    store.close()
    store.close()
    for call in (
        lambda: store.exists([key(1)]), lambda: store.get([key(1)], [room()]), lambda: store.put([], []),
        lambda: store.delete([]), lambda: store.trim(),
    ):  # fmt: skip
        with pytest.raises(kvpool.ClosedError):
            call()
    assert len(os.listdir("/proc/self/fd")) == before


def test_close_lets_a_call_end_that_is_under_way(tmp_path, monkeypatch):
    store = DirectoryStore(tmp_path / "store")
    write = os.pwritev

    def closing(*arguments):
        store.close()
        return write(*arguments)

    monkeypatch.setattr(os, "pwritev", closing)
    assert store.put([key(1)], [content(1)]) == 1
    with pytest.raises(kvpool.ClosedError):
        store.exists([key(1)])


def test_each_call_has_a_deadline(store):
    stored(store)
    for call in (
        lambda: store.exists([key(1)], timeout=0),
        lambda: store.put([key(2)], [content(2)], timeout=0), lambda: store.delete([key(1)], timeout=0),
        lambda: store.trim(timeout=0),
    ):  # fmt: skip
        with pytest.raises(kvpool.DeadlineExceeded):
            call()
    assert store.exists([key(1), key(2)], timeout=60) == [True, False]
    assert store.get([key(1)], [room()], timeout=0) == [False]  # says what has come


def test_a_get_returns_what_has_come_by_its_deadline(store, monkeypatch):
    store.put([key(number) for number in range(4)], [content(number) for number in range(4)])
    now = [100.0]
    monkeypatch.setattr(directory_module.time, "monotonic", lambda: now[0])
    get = store._get

    def slow(*arguments):
        now[0] += 1
        return get(*arguments)

    monkeypatch.setattr(store, "_get", slow)
    into = [room() for _ in range(4)]
    assert store.get([key(number) for number in range(4)], into, timeout=1.5) == [True, True, False, False]
    assert [joined(one) for one in into[:2]] == [joined(content(number)) for number in range(2)]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda store: store.exists(["../../etc/passwd" * 2]), kvpool.ArgumentTypeError),
        (lambda store: store.exists([b"short"]), kvpool.ArgumentError),
        (lambda store: store.exists(5), kvpool.ArgumentTypeError),
        (lambda store: store.exists(b"x" * 32), kvpool.ArgumentTypeError),
        (lambda store: store.put([key(1)], None), kvpool.ArgumentTypeError),
        (lambda store: store.get([key(1)], None), kvpool.ArgumentTypeError),
        (lambda store: store.put([key(1)], [None]), kvpool.ArgumentTypeError),
        (lambda store: store.trim(size_max=-5), kvpool.ArgumentError),
        (lambda store: DirectoryStore(5), kvpool.ArgumentTypeError),
        (lambda store: DirectoryStore(store.path.encode()), kvpool.ArgumentTypeError),
        (lambda store: store.exists([b"x" * 65]), kvpool.ArgumentError),
        (lambda store: store.put([key(1)], []), kvpool.ArgumentError),
        (lambda store: store.put([key(1)], [memoryview(b"x")]), kvpool.ArgumentTypeError),
        (lambda store: store.put([key(1)], [[b"x"]]), kvpool.ArgumentTypeError),
        (lambda store: store.put([key(1)], [[memoryview(b"abcd")[::2]]]), kvpool.ArgumentError),
        (lambda store: store.get([key(1)], [[memoryview(b"read-only")]]), kvpool.ArgumentError),
        (lambda store: store.exists([key(1)], timeout=-1), kvpool.ArgumentError),
        (lambda store: DirectoryStore(store.path, size_max=0), kvpool.ArgumentError),
        (lambda store: DirectoryStore(store.path, size_max="1GB"), kvpool.ArgumentTypeError),
        (lambda store: DirectoryStore(store.path, age_max_s=-1), kvpool.ArgumentError),
    ],
)
def test_wrong_arguments_are_refused_and_change_nothing(store, call, error):
    with pytest.raises(error):
        call(store)
    assert files_of(store) == []


def test_the_modules_constants_fit_each_other():
    assert folders.FOLDERS == 256
    assert directory_module.HEADER_BYTES == 112
