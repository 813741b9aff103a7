"""Which blocks of a store go."""

from __future__ import annotations

import random

import pytest

from kvpool.storage.folders import FOLDERS, StoredFile
from kvpool.storage.sweeping import Sweep, victims

S = 10**9


def file(number: int, used_s: float, size: int = 100) -> StoredFile:
    return StoredFile(number % FOLDERS, f"{number}", size, int(used_s * S))


def test_nothing_goes_without_a_limit():
    assert victims([file(1, 5)], None, None, 10 * S) == []


def test_the_least_recently_used_go_until_the_size_fits():
    files = [file(1, 5), file(2, 3), file(3, 4), file(4, 9)]
    assert [one.name for one in victims(files, 200, None, 10 * S)] == ["2", "3"]
    assert victims(files, 400, None, 10 * S) == []
    assert len(victims(files, 0, None, 10 * S)) == 4


def test_what_is_too_old_goes():
    assert [one.name for one in victims([file(1, 5), file(2, 8)], None, 3, 10 * S)] == ["1"]


def test_a_sweep_visits_each_folder_in_turn_while_an_eighth_of_the_size_is_written():
    sweep = Sweep(8 * FOLDERS * 100, None, 7)
    visited = [number for _ in range(FOLDERS) for number in sweep.written(100)]
    assert visited == [(7 + step) % FOLDERS for step in range(FOLDERS)]


def test_a_large_block_makes_it_visit_each_folder_once_at_most():
    assert sorted(Sweep(1000, None, 0).written(10**9)) == list(range(FOLDERS))


def test_an_age_alone_is_swept_for_slowly():
    sweep = Sweep(None, 60, 0)
    assert sum(len(sweep.written(10**9)) for _ in range(640)) == 10


def test_without_limits_nothing_is_visited():
    assert Sweep(None, None, 0).written(10**12) == []


def test_nothing_goes_for_its_size_before_all_folders_were_seen():
    sweep = Sweep(50, None, 0)
    for number in range(FOLDERS - 1):
        assert sweep.gone(number, [file(number, number)], 10**6 * S) == []
    assert sweep.gone(FOLDERS - 1, [file(FOLDERS - 1, 0)], 10**6 * S)


@pytest.mark.parametrize("seed", range(5))
def test_a_store_under_writes_stays_near_its_size_and_keeps_what_was_used_last(seed):
    chance = random.Random(seed)
    size_max, block = 200_000, 1000
    sweep = Sweep(size_max, None, chance.randrange(FOLDERS))
    stored: dict[str, StoredFile] = {}
    for number in range(2000):
        stored[str(number)] = StoredFile(chance.randrange(FOLDERS), str(number), block, number * S)
        for folder in sweep.written(block):
            there = [one for one in stored.values() if one.folder == folder]
            for gone in sweep.gone(folder, there, number * S):
                del stored[gone.name]
        assert len(stored) * block <= size_max * 1.3
    assert len(stored) * block >= size_max * 0.75
    newest = [str(number) for number in range(2000 - 100, 2000)]
    assert all(name in stored for name in newest)
