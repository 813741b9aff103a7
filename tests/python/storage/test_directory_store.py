"""A store in a folder: whole blocks or misses, whatever lies there."""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
import time
from pathlib import Path

import pytest
from storage_kit import content, files_of, joined, key, leftovers_of, room

import kvpool
from kvpool.storage import DirectoryStore, folders
from kvpool.storage import directory as directory_module
from kvpool.storage.block_file import HEADER_BYTES


@pytest.fixture
def store(tmp_path):
    with DirectoryStore(tmp_path / "store") as opened:
        yield opened


def read(store: DirectoryStore, number: int, size: int = 1000, pieces: int = 1) -> bytes | None:
    into = room(size, pieces)
    return joined(into) if store.get([key(number)], [into]) == [True] else None


def stored(store: DirectoryStore, number: int = 1) -> Path:
    """Stores a block; its file."""
    before = set(files_of(store))
    assert store.put([key(number)], [content(number)]) == 1
    (file,) = set(files_of(store)) - before
    return file


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


# ---- what is torn, rotten or foreign


def damaged(file: Path, how: str) -> None:
    whole = bytearray(file.read_bytes())
    if how == "shorter":
        del whole[-1:]
    elif how == "longer":
        whole += b"x"
    elif how == "empty":
        whole.clear()
    elif how == "half a header":
        del whole[HEADER_BYTES // 2 :]
    elif how == "only a header":
        del whole[HEADER_BYTES:]
    elif how == "zeros":
        whole[:] = bytes(len(whole))
    else:
        at = {"content": HEADER_BYTES + 500, "last byte": len(whole) - 1}.get(how, int(how) if how.isdigit() else 0)
        whole[at] ^= 1
    file.write_bytes(whole)


FAULTS = {
    "shorter": "torn", "longer": "torn", "empty": "torn", "half a header": "torn", "only a header": "torn",
    "zeros": "foreign", "content": "rotten", "last byte": "rotten", "0": "foreign", "8": "rotten", "16": "rotten",
    "24": "rotten", "32": "rotten", "100": "rotten",
}  # fmt: skip


@pytest.mark.parametrize("how", FAULTS)
def test_a_damaged_file_is_a_miss_and_removed(store, how, caplog):
    file = stored(store)
    damaged(file, how)
    assert read(store, 1) is None
    stats = store.stats()
    assert (stats.hits, stats.misses) == (0, 1)
    assert {name: getattr(stats, name) for name in ("torn", "rotten", "foreign")} == {
        "torn": 0, "rotten": 0, "foreign": 0, FAULTS[how]: 1
    }  # fmt: skip
    assert not file.exists()
    assert store.put([key(1)], [content(1)]) == 1  # and can be written anew
    assert read(store, 1) == joined(content(1))


def test_every_flipped_bit_of_a_header_is_found(store):
    file = stored(store)
    whole = file.read_bytes()
    for at in range(HEADER_BYTES):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        assert read(store, 1) is None, at


def test_the_file_of_another_key_is_a_miss(store):
    one, other = stored(store, 1), stored(store, 2)
    other.write_bytes(one.read_bytes())
    assert read(store, 2) is None
    assert store.stats().foreign == 1


def test_content_of_another_size_is_a_miss(store):
    stored(store)
    assert read(store, 1, size=999) is None
    assert store.stats().torn == 1


def test_a_file_of_another_size_is_written_again(store):
    file = stored(store)
    damaged(file, "shorter")
    assert store.put([key(1)], [content(1)]) == 1
    assert read(store, 1) == joined(content(1))


@pytest.mark.parametrize("what", ["link", "fifo", "folder"])
def test_what_is_no_file_is_a_miss_and_stays(store, tmp_path, what):
    file = stored(store)
    outside = tmp_path / "outside"
    outside.write_bytes(file.read_bytes())
    file.unlink()
    if what == "link":
        file.symlink_to(outside)
    elif what == "fifo":
        os.mkfifo(file)
    else:
        file.mkdir()
    assert read(store, 1) is None  # and the reader does not hang
    assert store.exists([key(1)]) == [False]
    assert store.stats().foreign == 1
    assert os.path.lexists(file)
    assert store.delete([key(1)]) == 0
    assert store.trim(size_max=1).removed == 0
    assert outside.exists()


def test_a_link_in_place_of_a_folder_leads_nowhere(store, tmp_path):
    file = stored(store)
    outside = tmp_path / "outside"
    file.parent.rename(outside)
    file.parent.symlink_to(outside)
    assert read(store, 1) is None
    assert store.stats().foreign == 1
    with pytest.raises(kvpool.StoreFailed):
        store.put([key(1)], [content(1)])
    assert store.trim(size_max=1).blocks == 0
    assert len(list(outside.iterdir())) == 1


def test_a_link_in_place_of_a_block_is_replaced_and_not_followed(store, tmp_path):
    file = stored(store)
    outside = tmp_path / "outside"
    outside.write_text("precious")
    file.unlink()
    file.symlink_to(outside)
    assert store.put([key(1)], [content(1)]) == 1
    assert read(store, 1) == joined(content(1))
    assert outside.read_text() == "precious"


def test_the_files_of_another_owner_stay(store, monkeypatch):
    file = stored(store)
    damaged(file, "content")
    monkeypatch.setattr(store._folders, "_owner", os.getuid() + 1)
    assert read(store, 1) is None
    assert file.exists()
    assert store.trim(size_max=1).blocks == 0


def test_a_file_that_cannot_be_read_is_a_miss(store, monkeypatch):
    stored(store)

    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", broken)
        assert read(store, 1) is None
    assert store.stats().rotten == 1


def test_a_file_system_that_is_gone_is_an_error(store, monkeypatch):
    stored(store)

    def gone(*_, **__):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(os, "open", gone)
    with pytest.raises(kvpool.StoreFailed, match="Stale") as caught:
        read(store, 1)
    assert caught.value.errno == errno.ESTALE
    assert store.stats().failed_reads == 1


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
        lambda: store.exists([key(1)], timeout=0), lambda: store.get([key(1)], [room()], timeout=0),
        lambda: store.put([key(2)], [content(2)], timeout=0), lambda: store.delete([key(1)], timeout=0),
        lambda: store.trim(timeout=0),
    ):  # fmt: skip
        with pytest.raises(kvpool.DeadlineExceeded):
            call()
    assert store.exists([key(1), key(2)], timeout=60) == [True, False]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda store: store.exists(["../../etc/passwd" * 2]), kvpool.ArgumentTypeError),
        (lambda store: store.exists([b"short"]), kvpool.ArgumentError),
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
