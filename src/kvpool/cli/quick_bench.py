"""What `kvpool bench` measures: little enough for a wheel. bench/ of the repository is the thorough one."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter_ns
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.config import Settings
from kvpool.errors import StateError
from kvpool.pool import Pool
from kvpool.types import DRAM, HBM, RawLayout, SettingArguments

__all__ = ["Row", "measure", "time_alloc_free"]

_BLOCKS: Final = 256
_TOKENS: Final = 16  # of a block
_PROMPTS: Final = 2000
_PROMPT_TOKENS: Final = 2048
_COPIED: Final = 64  # blocks of a swap and of a transfer
_COPIED_BYTES: Final = 256 << 10  # of one of them
_THREADS: Final = 1  # that copy, in a swap as in a memcpy
_UNMEASURED: Final = 2  # copies at first, which touch memory and make the way
_ROUNDS_MIN: Final = 20

# Explicit, so that no setting of the environment names both pools alike, takes a route away, or lends nothing.
_SETTINGS: Final[SettingArguments] = {
    "name": "bench", "routes": (), "lend_max": Settings.lend_max, "huge_pages": "never", "secret": "bench",
    "copy_threads": _THREADS,
}  # fmt: skip

_PEER: Final = """\
import sys
from kvpool import Pool, RawLayout
with Pool(RawLayout({bytes}, {tokens}), hbm_blocks={blocks}, **{settings}) as pool:
    print(pool.peers.listen("unix:@kvpool-bench-" + str(__import__("os").getpid())), flush=True)
    sys.stdin.read()
"""


class Row(NamedTuple):
    """One measurement: the median of its calls, and for copies the speed, and that of memcpy in turns with it."""

    what: str
    median_us: float
    gib_s: float | None = None
    of_memcpy: float | None = None


def measure(quick: bool = False) -> Iterator[Row]:
    """Measures row after row, in some seconds and with less than 200 MiB.

    Args:
        quick: A fifth of the rounds.

    Raises:
        OutOfMemory: There is too little memory.
        StateError: The other process cannot be started.
    """
    rounds = 40 if quick else 200
    yield from _allocation(rounds)
    yield from _prompts(rounds)
    yield from _swap(max(_ROUNDS_MIN, rounds // 10))
    yield from _transfer(max(_ROUNDS_MIN, rounds // 10))


def time_alloc_free(pool: Pool, blocks: int, rounds: int) -> tuple[list[float], list[float]]:
    """Microseconds of each allocation of so many blocks, and of freeing them."""
    alloc_us, free_us = [], []
    with _no_collections():
        for _ in range(rounds):
            began = perf_counter_ns()
            addrs = pool.alloc(blocks)
            between = perf_counter_ns()
            pool.free(addrs)
            free_us.append((perf_counter_ns() - between) / 1000)
            alloc_us.append((between - began) / 1000)
    return alloc_us, free_us


def _allocation(rounds: int) -> Iterator[Row]:
    with _pool(64, hbm=100_000) as pool:
        alloc_us, free_us = time_alloc_free(pool, _BLOCKS, rounds)
    yield Row(f"alloc of {_BLOCKS} blocks", median(alloc_us))
    yield Row(f"free of {_BLOCKS} blocks", median(free_us))


def _prompts(rounds: int) -> Iterator[Row]:
    """A cache of prompts, each of which shares its first half with three others."""
    random = np.random.default_rng(1)
    halves = random.integers(0, 1 << 20, (_PROMPTS // 4, _PROMPT_TOKENS // 2), np.int32)
    ends = random.integers(0, 1 << 20, (_PROMPTS + rounds, _PROMPT_TOKENS // 2), np.int32)
    all_ = [np.concatenate([halves[number % len(halves)], end]) for number, end in enumerate(ends)]
    count = _PROMPT_TOKENS // _TOKENS
    with _pool(64, hbm=(len(all_) + 8) * count) as pool:
        for prompt in all_[:_PROMPTS]:
            pool.insert(prompt, pool.alloc(count), free_duplicates=True).close()
        order = random.integers(0, _PROMPTS, rounds)
        match_us = [_timed(lambda prompt: pool.match(prompt).close(), all_[number]) for number in order]
        insert_us = [_timed(_insert, pool, prompt, pool.alloc(count)) for prompt in all_[_PROMPTS:]]
    cached = f"{_PROMPTS} prompts cached"
    yield Row(f"match of a prompt of {_PROMPT_TOKENS} tokens, {cached}", median(match_us))
    yield Row(f"insert of such a prompt, half of it new, {cached}", median(insert_us))


def _insert(pool: Pool, prompt: npt.NDArray[np.int32], addrs: npt.NDArray[np.uint64]) -> None:
    pool.insert(prompt, addrs, free_duplicates=True).close()


def _swap(rounds: int) -> Iterator[Row]:
    tokens = np.arange(_COPIED * _TOKENS, dtype=np.int32)
    with _pool(_COPIED_BYTES, hbm=_COPIED, dram=_COPIED) as pool:
        pool.tensor(HBM).numpy()[:] = 1
        pool.tensor(DRAM).numpy()[:] = 1
        pool.insert(tokens, pool.alloc(_COPIED)).close()
        plain = _Memcpy()
        swap_us: list[float] = []
        for number in range(_UNMEASURED + rounds):
            plain.copy()
            took = _timed(pool.swap_out, _COPIED)
            if number >= _UNMEASURED:
                swap_us.append(took)
            with pool.match(tokens, into=HBM):  # back again
                pass
    yield _copied(f"swap_out of {_COPIED} blocks of {_COPIED_BYTES >> 10} KiB, 1 thread", swap_us, plain)


def _transfer(rounds: int) -> Iterator[Row]:
    with _pool(_COPIED_BYTES, hbm=_COPIED) as pool, _other_process() as address:
        pool.tensor(HBM).numpy()[:] = 1
        peer = pool.peers.connect(address)
        for count in (1, _COPIED):
            addrs = pool.alloc(_COPIED)
            theirs = pool.alloc(_COPIED, instance=peer)
            plain = _Memcpy(count)
            sent_us, route = [], ""
            for number in range(_UNMEASURED + rounds):
                plain.copy()
                first = number * count % _COPIED
                one, other = addrs[first : first + count], theirs[first : first + count]
                began = perf_counter_ns()
                sent = pool.transfer(peer, one, to=other).wait()
                if number >= _UNMEASURED:
                    sent_us.append((perf_counter_ns() - began) / 1000)
                route = sent.stats.route
            pool.free(theirs)
            pool.free(addrs)
            what = f"{count} block{'s' if count > 1 else ''} of {_COPIED_BYTES >> 10} KiB"
            yield _copied(f"transfer of {what} to another process, {route}", sent_us, plain, count)


class _Memcpy:
    """Plain copies of as many bytes, to compare with."""

    def __init__(self, blocks: int = _COPIED) -> None:
        turns = _COPIED // blocks  # as transfers: a single block would stay in the cache of the processor
        self._source = np.ones((turns, blocks * _COPIED_BYTES), np.uint8)
        self._target = np.zeros_like(self._source)
        self._times_us: list[float] = []

    def copy(self) -> None:
        """Copies once."""
        turn = len(self._times_us) % len(self._source)
        self._times_us.append(_timed(np.copyto, self._target[turn], self._source[turn]))

    def median_us(self) -> float:
        """Of a copy, without the first ones."""
        return median(self._times_us[_UNMEASURED:])


def _copied(what: str, times_us: list[float], plain: _Memcpy, blocks: int = _COPIED) -> Row:
    took = median(times_us)
    return Row(what, took, blocks * _COPIED_BYTES / 2**30 / took * 1e6, plain.median_us() / took)


def _timed(call: Callable[..., object], *arguments: object) -> float:
    """Microseconds of one call."""
    began = perf_counter_ns()
    call(*arguments)
    return (perf_counter_ns() - began) / 1000


def _pool(block_bytes: int, hbm: int, dram: int = 0) -> Pool:
    return Pool(RawLayout(block_bytes, _TOKENS), hbm, dram, **_SETTINGS)


@contextmanager
def _no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def _other_process() -> Iterator[str]:
    """A process with a pool; the address at which it listens."""
    code = _PEER.format(
        bytes=_COPIED_BYTES, tokens=_TOKENS, blocks=2 * _COPIED, settings=_SETTINGS | {"name": "theirs"}
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:  # fmt: skip
        try:
            address = process.stdout.readline().strip() if process.stdout else ""
            if not address:
                raise StateError("the other process, to which blocks would be sent, did not start")
            yield address
        finally:
            process.kill()
