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


def test_a_sweep_begins_with_a_few_folders_and_visits_each_in_turn_while_an_eighth_of_the_size_is_written():
    sweep = Sweep(8 * FOLDERS * 100, None, 7)
    assert sweep.written(100) == [(7 + step) % FOLDERS for step in range(17)]
    visited = [number for _ in range(FOLDERS) for number in sweep.written(100)]
    assert visited == [(24 + step) % FOLDERS for step in range(FOLDERS)]


def test_a_large_block_makes_it_visit_each_folder_once_at_most():
    assert sorted(Sweep(1000, None, 0).written(10**9)) == list(range(FOLDERS))


def test_an_age_alone_is_swept_for_slowly():
    sweep = Sweep(None, 60, 0)
    assert sum(len(sweep.written(10**9)) for _ in range(640)) == 10


def test_without_limits_nothing_is_visited():
    assert Sweep(None, None, 0).written(10**12) == []


def test_nothing_goes_for_its_size_before_a_few_folders_were_seen():
    sweep = Sweep(50, None, 0)
    for number in range(16):
        assert sweep.gone([file(number, 0)], 10**6 * S) == []
        sweep.saw(number, [file(number, number)])
    assert sweep.gone([file(16, 0)], 10**6 * S)


class Writers:
    """Processes that write to one store, in turn, each of which knows what it has seen itself."""

    def __init__(self, size_max: int, processes: int, seed: int) -> None:
        self._chance = random.Random(seed)
        self._size_max = size_max
        self._sweeps = [self._began() for _ in range(processes)]
        self._folders: list[dict[str, StoredFile]] = [{} for _ in range(FOLDERS)]
        self.blocks = self.most = 0

    def _began(self) -> Sweep:
        return Sweep(self._size_max, None, self._chance.randrange(FOLDERS))

    def begin_again(self) -> None:
        self._sweeps = [self._began() for _ in self._sweeps]

    def write(self, number: int, size: int) -> None:
        sweep = self._sweeps[number % len(self._sweeps)]
        at = self._chance.randrange(FOLDERS)
        self._folders[at][f"{number}"] = StoredFile(at, f"{number}", size, number * S)
        self.blocks += 1
        found = {folder: [*self._folders[folder].values()] for folder in sweep.written(size)}
        for folder, files in found.items():
            sweep.saw(folder, files)
        for folder, files in found.items():
            for gone in sweep.gone(files, number * S):
                del self._folders[folder][gone.name]
                self.blocks -= 1
        self.most = max(self.most, self.blocks)

    def has(self, number: int) -> bool:
        return any(f"{number}" in files for files in self._folders)


@pytest.mark.parametrize("seed", range(3))
def test_a_store_under_writes_stays_near_its_size_and_keeps_what_was_used_last(seed):
    writers = Writers(200_000, 1, seed)
    for number in range(1000):
        writers.write(number, 1000)
    assert writers.most <= 200 * 1.25
    assert writers.blocks >= 200 * 0.75
    assert all(writers.has(number) for number in range(900, 1000))


def test_processes_that_write_a_few_blocks_each_keep_the_size_together():
    """None of them comes round once."""
    writers = Writers(4000 * 100, 1, 1)
    for number in range(8000):
        if number % 8 == 0:
            writers.begin_again()
        writers.write(number, 100)
    assert writers.blocks >= 4000 * 0.75
    assert writers.most <= 4000 * 1.25


def test_many_processes_that_write_at_once_keep_the_size_together():
    """Each sees a sixteenth of what is written; a thousand blocks and more say how large the store is by now."""
    writers = Writers(4000 * 100, 16, 1)
    for number in range(12_000):
        writers.write(number, 100)
    assert writers.blocks >= 4000 * 0.75
    assert writers.most <= 4000 * 1.35
