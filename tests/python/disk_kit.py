"""Shared by the tests of blocks on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kit import BLOCK, Stamps, small_layout, small_pool, store

import kvpool
from kvpool import DRAM


def disk_pool(
    path: Path | str, disk_blocks: int = 32, dram_blocks: int = 8, hbm_blocks: int = 0, **more: Any
) -> kvpool.Pool:
    """A pool with blocks on disk, on the CPU; without HBM, unless it is asked for."""
    return small_pool(hbm_blocks, dram_blocks, disk_blocks=disk_blocks, disk_path=path, **more)


def use(pool: kvpool.Pool, tokens: Any, times: int = 1) -> int:
    """Matches a prompt so often; the tokens that the last match found."""
    found = 0
    for _ in range(times):
        with pool.match(tokens) as hit:
            found = hit.tokens
    return found


def store_stamped(pool: kvpool.Pool, tokens: Any, first: int, *, medium: int = DRAM) -> None:
    """Caches a prompt whose block i has the stamp `first` + i."""
    Stamps(pool).write(store(pool, tokens, medium=medium, evict=True), range(first, first + len(tokens) // BLOCK))


def media_of(pool: kvpool.Pool, tokens: Any) -> list[int]:
    """Where the cached blocks of a prompt lie; no use of it."""
    return list(kvpool.media(pool.explain_match(tokens).addrs))


def to_disk(pool: kvpool.Pool, tokens: Any, first: int) -> None:
    """A prompt with stamps that lies on DISK alone. REQUIRES: DRAM has room for it."""
    store_stamped(pool, tokens, first)
    pool.flush(everything=True)
    pool.evict(pool.stats().dram.capacity)


def data_file(path: Path) -> Path:
    """The file of the slots."""
    return path / "kvpool.blocks"


def damage(path: Path, slot: int) -> None:
    """Turns a bit in the middle of a slot's block."""
    block = small_layout().block_bytes
    at = 4096 + slot * -(-block // 4096) * 4096 + block // 2  # behind the file's head
    with data_file(path).open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 0x40]))
