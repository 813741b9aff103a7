"""Shared by the tests of kvpool.storage: contents, and stores that misbehave."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import kit
import numpy as np

import kvpool
from kvpool.storage import DirectoryStore, Storage, StoreStats


def key(number: int) -> bytes:
    """A content key; the numbers from 0 to 255 are in different folders."""
    return bytes([number % 256]) + number.to_bytes(31, "little")


def content(number: int, size: int = 1000, pieces: int = 1) -> list[memoryview]:
    """Bytes that differ from number to number."""
    rows = np.random.default_rng(number).integers(0, 256, size, np.uint8)
    return [memoryview(part) for part in np.array_split(rows, pieces)]


def room(size: int = 1000, pieces: int = 1) -> list[memoryview]:
    return [memoryview(part) for part in np.array_split(np.zeros(size, np.uint8), pieces)]


def joined(pieces: list[memoryview]) -> bytes:
    return b"".join(pieces)


def files_of(store: DirectoryStore) -> list[Path]:
    """The files of its blocks."""
    return sorted(Path(store.path).glob("*/*.kv"))


def leftovers_of(store: DirectoryStore) -> list[Path]:
    return sorted(Path(store.path).glob("*/.*.new"))


def read(store: DirectoryStore, number: int, size: int = 1000, pieces: int = 1) -> bytes | None:
    into = room(size, pieces)
    return joined(into) if store.get([key(number)], [into]) == [True] else None


def stored(store: DirectoryStore, number: int = 1) -> Path:
    """Stores a block; its file."""
    before = set(files_of(store))
    assert store.put([key(number)], [content(number)]) == 1
    (file,) = set(files_of(store)) - before
    return file


class MemoryStore:
    """Keeps blocks in a dict. Reads and writes can be held up, and fail."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.reads = threading.Event()  # get waits for it
        self.writes = threading.Event()  # put waits for it
        self.reads.set()
        self.writes.set()
        self.begun = threading.Semaphore(0)  # released by each get that begins
        self.put_begun = threading.Semaphore(0)
        self.ended = threading.Semaphore(0)
        self.failure: Exception | None = None
        self.calls: list[tuple[str, Any]] = []

    def exists(self, keys, *, timeout=None):
        self._called("exists", len(keys))
        return [one in self.blocks for one in keys]

    def get(self, keys, into, *, timeout=None):
        self._called("get", len(keys))
        self.begun.release()
        assert self.reads.wait(60)
        found = []
        for one, pieces in zip(keys, into, strict=True):
            found.append(one in self.blocks)
            at = 0
            for piece in pieces if found[-1] else []:
                piece[:] = self.blocks[one][at : at + piece.nbytes]
                at += piece.nbytes
        self.ended.release()
        return found

    def put(self, keys, contents, *, timeout=None):
        self._called("put", len(keys))
        self.put_begun.release()
        assert self.writes.wait(60)
        new = sum(one not in self.blocks for one in keys)
        self.blocks |= {one: b"".join(pieces) for one, pieces in zip(keys, contents, strict=True)}
        return new

    def delete(self, keys, *, timeout=None):
        self._called("delete", len(keys))
        return sum(self.blocks.pop(one, None) is not None for one in keys)

    def stats(self):
        return StoreStats()

    def close(self):
        pass

    def _called(self, name: str, keys: int) -> None:
        self.calls.append((name, keys))
        if self.failure is not None:
            raise self.failure


# ---- pools with a store

LONG_S = 60.0  # a budget that a test never spends


def joined_to(pool: kvpool.Pool, where: Any, **options: Any) -> Storage:
    return Storage(pool, where, **{"model": "m", "write": "never"} | options)


def stamped(pool: kvpool.Pool, tokens: np.ndarray, stamps: list[int], **options: Any) -> np.ndarray:
    """Caches a prompt whose blocks have these stamps."""
    addrs = kit.store(pool, tokens, **options)
    kit.Stamps(pool).write(addrs, stamps)
    return addrs


def stamps_of(pool: kvpool.Pool, tokens: np.ndarray, namespace: str = "") -> list[int]:
    with pool.match(tokens, namespace) as hit:
        return kit.Stamps(pool).read(hit.addrs)


def saved_by(
    where: Any, tokens: np.ndarray, stamps: list[int], *, layout: Any = None, namespace: str = "", **options: Any
) -> None:
    """Another pool has saved a prompt."""
    with kit.small_pool(0, 16, layout, device="cpu") as pool, joined_to(pool, where, **options) as storage:
        stamped(pool, tokens, stamps, medium=kvpool.DRAM, namespace=namespace)
        assert storage.save(tokens, namespace).wait(LONG_S).saved == len(stamps)
