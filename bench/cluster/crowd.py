"""Many members in one process, as others see them: their entries in the folder of a local cluster, or in etcd.

A real member is a process with a pool, a heartbeat thread and, with etcd, a lease renewer: nobody runs a thousand on
one machine. What the others of a cluster pay for a member is to look at what it has written, so there is no more of it
here: the record, and in a folder the locked page, whose lease is longer than any bench.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import time
from abc import ABC, abstractmethod

import kvpool
from kvpool.cluster.etcd.gateway import Gateway, Options
from kvpool.cluster.etcd.keys import Ids, Keys, put
from kvpool.cluster.local.folder import Folder, State, folder_path, member_file
from kvpool.cluster.local.page import _MAGIC, _WORDS, lock_file
from kvpool.cluster.local.scanner import PAGE_SUFFIX, RECORD_SUFFIX
from kvpool.cluster.record import Load, Member

__all__ = ["Crowd", "EtcdCrowd", "LocalCrowd"]

_PAGE_BYTES = 4096
_LEASE_S = 3600
_AT_ONCE = 64  # operations of one transaction: etcd allows 128


class Crowd(ABC):
    """Members from 1 to some number; their ids are their numbers. For one thread."""

    url: str

    def __init__(self) -> None:
        self._records: list[Member] = []

    @property
    def size(self) -> int:
        return len(self._records)

    def grow(self, size: int) -> None:
        """So many members, at least."""
        fresh = [_member(number) for number in range(self.size + 1, size + 1)]
        self._enter(fresh)
        self._records += fresh

    def change(self, number: int, requests: int) -> int:
        """A member tells a new load. Returns when (CLOCK_MONOTONIC, in ns), just before it is written."""
        changed = dataclasses.replace(self._records[number - 1], load=Load(hbm_free=64, requests=requests))
        at_ns = time.monotonic_ns()
        self._write(changed)
        return at_ns

    @abstractmethod
    def _enter(self, records: list[Member]) -> None: ...

    @abstractmethod
    def _write(self, record: Member) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


def _member(number: int) -> Member:
    """As `Pool.attach` publishes one: some 500 bytes."""
    layout = {
        "kind": "KVLayout", "layers": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "block_tokens": 16,
        "order": "aggregated",
    }  # fmt: skip
    role = ("prefill", "decode")[number % 2]
    return Member(
        f"member-{number:04}", number, secrets.randbits(63), role, (f"tcp:10.0.{number >> 8}.{number & 255}:7000",),  # type: ignore[arg-type]
        layout, "model-7f3a", {"tp": 8, "pp": 1}, 4096, 16384, Load(hbm_free=64),
    )  # fmt: skip


class LocalCrowd(Crowd):
    """Files in the folder of a local cluster."""

    def __init__(self) -> None:
        super().__init__()
        name = f"bench-{os.getpid()}-{secrets.token_hex(4)}"
        self.url = f"local://{name}"
        self._folder = Folder(folder_path(name))
        self._folder.put_state(State.new(highest=0))
        self._pages: list[int] = []

    def _enter(self, records: list[Member]) -> None:
        for record in records:
            self._write(record)
            file = member_file(record.name) + PAGE_SUFFIX
            page = os.open(file + ".made", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=self._folder.descriptor)
            os.ftruncate(page, _PAGE_BYTES)
            beat_ns = time.monotonic_ns()
            words = (beat_ns, 0, _LEASE_S * 1_000_000_000, record.incarnation, record.instance, 0, _MAGIC)
            os.pwrite(page, _WORDS.pack(*words), 0)
            lock_file(page)
            self._pages.append(page)
            folder = self._folder.descriptor
            os.rename(file + ".made", file, src_dir_fd=folder, dst_dir_fd=folder)

    def _write(self, record: Member) -> None:
        self._folder.write(member_file(record.name) + RECORD_SUFFIX, record.to_bytes())

    def close(self) -> None:
        for page in self._pages:
            os.close(page)
        self._folder.close()
        kvpool.Cluster.forget(self.url)


class EtcdCrowd(Crowd):
    """Keys in an etcd, on one lease."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self.prefix = f"bench-{secrets.token_hex(4)}"
        self.url = f"etcd://127.0.0.1:{port}/{self.prefix}"
        self._keys = Keys(self.prefix)
        self._gateway = Gateway(Options((("127.0.0.1", port),)))
        self._lease = int(str(self._call("lease/grant", {"TTL": str(_LEASE_S), "ID": "0"})["ID"]))
        self._call("kv/txn", {"success": [put(self._keys.ids, Ids.new(0).to_bytes())]})

    def _call(self, path: str, body: dict[str, object]) -> dict[str, object]:
        return self._gateway.call(path, body, 30.0)

    def _enter(self, records: list[Member]) -> None:
        for at in range(0, len(records), _AT_ONCE):
            self._call("kv/txn", {"success": [self._put(record) for record in records[at : at + _AT_ONCE]]})

    def _put(self, record: Member) -> dict[str, object]:
        return put(self._keys.member(record.name), record.to_bytes(), self._lease)

    def _write(self, record: Member) -> None:
        self._call("kv/txn", {"success": [self._put(record)]})

    def close(self) -> None:
        self._call("lease/revoke", {"ID": str(self._lease)})
        self._gateway.close()
