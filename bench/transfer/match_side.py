"""One process of the bench `remote-match`: an owner of prompts, or the one who asks. See bench/remote.py."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

import kvpool
from bench.measure import no_collections

BLOCK_TOKENS = 16
TOKENS_MAX = 32_768
KEYS = 128
_KEY_BYTES = 32
LAYOUT = kvpool.KVLayout(layers=2, kv_heads=2, head_dim=16, dtype="float32", block_tokens=BLOCK_TOKENS)
_SECRET = "what the bench knows"
_numbers = itertools.count(1)

Vector = npt.NDArray[Any]


class Subject:
    """An owner (`own`), or the one who asks (`meet` and the rest)."""

    def own(self, link: str) -> dict[str, str]:
        """Caches a prompt of TOKENS_MAX tokens, and KEYS blocks under keys; returns where both listen."""
        self._pool = _pool(link)
        addrs = self._pool.alloc(TOKENS_MAX // BLOCK_TOKENS)
        self._pool.insert(_prompt(TOKENS_MAX), addrs).close()
        self._cache = kvpool.KeyedCache(self._pool, KEYS, _KEY_BYTES, "bench")
        self._cache.put(_keys(), np.ones((KEYS, self._cache.block_bytes), np.uint8))
        bare = _listener(link)
        threading.Thread(target=_echo, args=(bare,), daemon=True).start()
        at: str = bare.getsockname().decode() if link == "unix" else "{}:{}".format(*bare.getsockname())
        address = "tcp:127.0.0.1:0" if link != "unix" else f"unix:@kvpool-bench-{os.getpid()}-{next(_numbers)}"
        return {"pool": self._pool.peers.listen(address), "bare": at.replace("\0", "@")}

    def meet(self, link: str, owners: list[dict[str, str]]) -> None:
        self._pool = _pool(link)
        self._cache = kvpool.KeyedCache(self._pool, KEYS, _KEY_BYTES, "bench")
        self._names = [self._pool.peers.connect(owner["pool"]) for owner in owners]
        self._bare = _dial(link, owners[0]["bare"])

    def matches(self, tokens: int, peers: int, repeats: int) -> list[float]:
        """Microseconds of each question, answered by all; the holds are closed outside the time."""
        prompt, names = _prompt(tokens), self._names[:peers]

        def ask() -> list[kvpool.PeerMatch]:
            if peers == 1:
                return [self._pool.peers.match(names[0], prompt)]
            return self._pool.peers.match(names, prompt)

        times = []
        with no_collections():
            for _ in range(repeats):
                taken, found = _timed(ask)
                times.append(taken)
                assert all(one.tokens == tokens for one in found)
                for one in found:
                    one.close()
        return times

    def ping_pongs(self, tokens: int, repeats: int) -> list[float]:
        """Microseconds of a message and an answer of the same sizes over a bare socket of the same kind."""
        request = memoryview(bytearray(4 * tokens + 64))
        size = 8 * (tokens // BLOCK_TOKENS) + 64
        answer = memoryview(bytearray(size))
        request[:8] = len(request).to_bytes(4, "little") + size.to_bytes(4, "little")

        def ask() -> None:
            self._bare.sendall(request)
            _read(self._bare, answer)

        with no_collections():
            return [_timed(ask)[0] for _ in range(repeats)]

    def fetches(self, tokens: int, repeats: int, at_once: bool) -> list[float]:
        """Microseconds until a prompt that is not here is cached here: one call, or a match, a fetch and an insert."""
        pool, peer, prompt = self._pool, self._names[0], _prompt(tokens)

        def by_hand() -> None:
            with pool.peers.match(peer, prompt) as found:
                mine = pool.fetch(peer, found.addrs).wait().addrs
                pool.insert(prompt[: found.tokens], mine, free_duplicates=True).close()

        times = []
        with no_collections():
            for _ in range(repeats):
                taken, _ = _timed((lambda: pool.fetch_with_insert(peer, prompt).wait()) if at_once else by_hand)
                times.append(taken)
                assert pool.delete(prompt) == tokens // BLOCK_TOKENS
        return times

    def key_matches(self, repeats: int) -> list[float]:
        """Microseconds of each question for KEYS keys at one peer; the holds are closed outside the time."""
        keys, peer, times = _keys(), self._names[0], []
        with no_collections():
            for _ in range(repeats):
                taken, found = _timed(lambda: self._pool.peers.match_keys(peer, self._cache, keys))
                times.append(taken)
                assert found.first == KEYS
                found.close()
        return times

    def key_fetches(self, repeats: int) -> list[float]:
        """Microseconds until the blocks of KEYS keys that are not here are stored here."""
        keys, peer, times = _keys(), self._names[0], []
        with no_collections():
            for _ in range(repeats):
                taken, here = _timed(lambda: self._pool.peers.fetch_keys(peer, self._cache, keys))
                times.append(taken)
                assert here.first == KEYS
                here.close()
                self._cache.evict(KEYS)
        return times


def _keys() -> Vector:
    return np.arange(KEYS * _KEY_BYTES // 4, dtype=np.uint32).view(np.uint8).reshape(KEYS, _KEY_BYTES)


def _pool(link: str) -> kvpool.Pool:
    settings: dict[str, Any] = {"secret": _SECRET, "prefer_unix_socket": False, "huge_pages": "never"}
    settings["trusted_network"] = link == "tcp, trusted"
    return kvpool.Pool(LAYOUT, hbm_blocks=2 * TOKENS_MAX // BLOCK_TOKENS, dram_blocks=KEYS, **settings)


def _prompt(tokens: int) -> Vector:
    return np.arange(tokens, dtype=np.int32)


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter_ns()
    result = call()
    return (time.perf_counter_ns() - start) / 1000, result


def _listener(link: str) -> socket.socket:
    if link == "unix":
        bare = socket.socket(socket.AF_UNIX)
        bare.bind(f"\0kvpool-bench-bare-{os.getpid()}-{next(_numbers)}")
    else:
        bare = socket.socket(socket.AF_INET)
        bare.bind(("127.0.0.1", 0))
    bare.listen(1)
    return bare


def _dial(link: str, at: str) -> socket.socket:
    bare = socket.socket(socket.AF_UNIX if link == "unix" else socket.AF_INET)
    if link == "unix":
        bare.connect(at.replace("@", "\0"))
        return bare
    host, _, port = at.partition(":")
    bare.connect((host, int(port)))
    bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return bare


def _echo(listener: socket.socket) -> None:
    """Answers each message, whose first 8 bytes say how long it and its answer are."""
    bare, _ = listener.accept()
    if bare.family == socket.AF_INET:
        bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    room = memoryview(bytearray(4 * TOKENS_MAX + 64))
    while True:
        if not _read(bare, room[:8]):
            return
        length, answer = (int.from_bytes(room[at : at + 4], "little") for at in (0, 4))
        _read(bare, room[8:length])
        bare.sendall(room[:answer])


def _read(bare: socket.socket, room: memoryview) -> bool:
    at = 0
    while at < len(room):
        got = bare.recv_into(room[at:])
        if got == 0:
            return False
        at += got
    return True
