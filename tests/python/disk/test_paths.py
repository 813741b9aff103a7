"""Which directories a pool takes for its disk, and which it refuses before anything is there."""

from __future__ import annotations

import os

import pytest
from disk_kit import data_file, disk_pool, to_disk
from kit import BLOCK, Stamps, cached_tokens, prompt

import kvpool
from kvpool import DRAM


@pytest.mark.parametrize("path", ["", "a\0b", "\ud800"])
def test_a_path_that_no_directory_can_have_is_refused(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kvpool.ArgumentError, match="disk_path"):
        disk_pool(path)
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_not_utf_8_is_taken_as_it_is(tmp_path):
    name = os.path.join(os.fsencode(tmp_path), b"kv-\xff")
    with disk_pool(os.fsdecode(name)) as pool:
        to_disk(pool, prompt(2), 10)
        assert pool.stats().disk.path.endswith("kv-\ufffd")
    assert os.listdir(os.fsencode(tmp_path)) == [b"kv-\xff"]
    with disk_pool(os.fsdecode(name)) as pool, pool.match(prompt(2), into=DRAM) as hit:
        assert Stamps(pool).read(hit.addrs) == [10, 11]


def test_what_others_may_use_is_refused(tmp_path):
    with disk_pool(tmp_path / "kv") as pool:
        to_disk(pool, prompt(2), 10)
    (tmp_path / "kv").chmod(0o777)
    with pytest.raises(kvpool.StateError, match="others"):
        disk_pool(tmp_path / "kv")
    (tmp_path / "kv").chmod(0o700)
    data_file(tmp_path / "kv").chmod(0o666)
    with pytest.raises(kvpool.StateError, match=r"kvpool\.blocks"):
        disk_pool(tmp_path / "kv")
    data_file(tmp_path / "kv").chmod(0o600)
    with disk_pool(tmp_path / "kv") as pool:
        assert cached_tokens(pool, prompt(2)) == 2 * BLOCK


def test_a_file_that_was_cut_off_is_damage_when_the_pool_is_made(tmp_path):
    with disk_pool(tmp_path / "kv") as pool:
        to_disk(pool, prompt(2), 10)
    os.truncate(data_file(tmp_path / "kv"), 4096)
    with pytest.raises(kvpool.StateError, match="cut off"):
        disk_pool(tmp_path / "kv")
