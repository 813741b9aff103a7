"""A store in a folder: what is torn, rotten, foreign or cannot be read."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest
from storage_kit import content, files_of, joined, key, leftovers_of, read, room, stored

import kvpool
from kvpool.storage import DirectoryStore
from kvpool.storage import directory as directory_module
from kvpool.storage.block_file import HEADER_BYTES


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
    assert store.exists([key(1)]) == [False]
    assert store.put([key(1)], [content(1)]) == 0
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
    monkeypatch.setattr(store._folders, "_owners", {os.getuid() + 1})
    assert read(store, 1) is None
    assert file.exists()
    assert store.trim(size_max=1).blocks == 0


def failing(number):
    def fails(*_, **__):
        raise OSError(number, os.strerror(number))

    return fails


def test_a_file_that_cannot_be_read_is_a_miss_and_stays(store, monkeypatch):
    """The network may be to blame, and the file be good."""
    file = stored(store)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing(errno.EIO))
        assert read(store, 1) is None
    assert store.stats().rotten == 1
    assert file.exists()
    assert read(store, 1) == joined(content(1))


def test_many_files_that_cannot_be_read_are_a_failure_of_the_file_system(store, monkeypatch):
    numbers = range(5)
    store.put([key(number) for number in numbers], [content(number) for number in numbers])
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing(errno.EIO))
        with pytest.raises(kvpool.StoreFailed) as caught:
            store.get([key(number) for number in numbers], [room() for _ in numbers])
        assert caught.value.errno == errno.EIO
    assert len(files_of(store)) == 5
    assert read(store, 1) == joined(content(1))
    assert store.stats().failed_reads == 1


def test_a_file_that_another_host_has_removed_is_a_miss(store, monkeypatch):
    """NFS says so while it is read."""
    file = stored(store)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing(errno.ESTALE))
        assert read(store, 1) is None
    assert store.stats().misses == 1
    assert file.exists()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.ESTALE])
def test_a_file_that_cannot_be_opened_is_no_fault_of_the_others(store, monkeypatch, number):
    store.put([key(1), key(2)], [content(1), content(2)])
    opened = os.open

    def denied(path, *arguments, **options):
        if str(path).startswith(key(2).hex()):
            raise OSError(number, os.strerror(number))
        return opened(path, *arguments, **options)

    into = [room(), room()]
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", denied)
        assert store.get([key(2), key(1)], into) == [False, True]
    assert joined(into[1]) == joined(content(1))
    assert store.stats().foreign == (number != errno.ESTALE)
    assert len(files_of(store)) == 2


def test_a_good_file_that_was_written_meanwhile_is_not_removed_with_the_bad_one(store, monkeypatch):
    file = stored(store)
    damaged(file, "content")
    look = directory_module.content_fault

    def late(header, into):
        fault = look(header, into)
        file.unlink()
        monkeypatch.setattr(directory_module, "content_fault", look)
        stored(store)
        return fault

    monkeypatch.setattr(directory_module, "content_fault", late)
    assert read(store, 1) is None
    assert store.stats().rotten == 1
    assert read(store, 1) == joined(content(1))


@pytest.mark.parametrize("what", ["folder at a block", "file at a folder", "link at a folder"])
def test_one_thing_that_is_no_file_of_a_store_leaves_the_others_alone(store, tmp_path, what):
    """For reading, writing and deletion."""
    good, bad = key(1), key(2)
    store.put([good], [content(1)])
    folder = Path(store.path) / bad.hex()[:2]
    if what == "folder at a block":
        (folder / f"{bad.hex()}.kv" / "more").mkdir(parents=True)
    elif what == "file at a folder":
        folder.write_bytes(b"x")
    else:
        folder.symlink_to(tmp_path)
    assert store.exists([bad, good]) == [False, True]
    assert store.get([bad, good], [room(), room()]) == [False, True]
    assert store.put([bad, key(3)], [content(2), content(3)]) == 1
    assert not store.stats().read_only
    assert store.delete([bad, key(3)]) == 1
    assert store.trim().blocks == 1
    assert os.path.lexists(folder)
    assert leftovers_of(store) == []


def test_a_sweep_that_fails_is_no_failure_of_what_was_written(tmp_path, monkeypatch, caplog):
    with DirectoryStore(tmp_path / "s", size_max=1000) as store, caplog.at_level(logging.WARNING, "kvpool.storage"):
        monkeypatch.setattr(store._folders, "cleaned", failing(errno.EIO))
        for number in range(3):
            assert store.put([key(number)], [content(number)]) == 1
        assert not store.stats().read_only
        assert len(caplog.records) == 1


def test_a_file_system_that_is_gone_is_an_error(store, monkeypatch):
    stored(store)

    def gone(*_, **__):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(os, "open", gone)
    with pytest.raises(kvpool.StoreFailed, match="Stale") as caught:
        read(store, 1)
    assert caught.value.errno == errno.ESTALE
    assert store.stats().failed_reads == 1
