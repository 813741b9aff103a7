"""An engine whose next token is a function of all keys and values that it reads: a wrong, stale or missing block, or a
block that was read before its last write, changes the tokens.

A cell is a token's part of a block; every element of it holds the same number.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from dataclasses import dataclass, field

import numpy as np
from kit import BLOCK, content, small_pool

import kvpool
from kvpool.control import migration
from kvpool.policy.migration import FIRST, OutputGate, Term

LENGTH = 60  # tokens of a request, with its prompt

_numbers = itertools.count(1)


def cell(token, at):
    return token * 1000 + at


def next_token(cells):
    value = 7
    for each in cells:
        value = (value * 31 + int(each)) % 1009
    return value


def reference(prompt, length):
    """The tokens of a run without migration."""
    tokens = [int(token) for token in prompt]
    while len(tokens) < length:
        tokens.append(next_token(cell(token, at) for at, token in enumerate(tokens)))
    return tokens


def prompt_of(seed, tokens=10):
    return np.random.default_rng(seed).integers(0, 900, tokens).astype(np.int32)


@dataclass
class Request:
    tokens: list[int]
    whole: int
    blocks: np.ndarray
    own: np.ndarray
    prefix: kvpool.Match
    prompt: int
    length: int
    term: Term = FIRST
    stopped: bool = False
    spare: list[int] = field(default_factory=list)


class Reader:
    """Reads what engines put out: in order, each token once, and nothing of an old term."""

    def __init__(self):
        self.gate = OutputGate()
        self.lock = threading.Lock()
        self.tokens = {}
        self.by = {}  # which engine put out in a term

    def put(self, request, term, position, token, engine):
        with self.lock:
            assert self.by.setdefault((request, term), engine) == engine, f"{request} runs twice in {term}"
            if self.gate.accept(request, term, position):
                self.tokens.setdefault(request, []).append(token)


class ToyEngine:
    """See above. Hooks for tests: `before[name]` is called at the beginning of each call of that name."""

    def __init__(self, pool, reader, name):
        self.pool, self.reader, self.name = pool, reader, name
        self.kv = content(pool, kvpool.HBM)
        self.requests = {}
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.before = {}
        self.prefilled = []
        self.states = {}
        self.admits = True
        self.steps_s = None
        self._end = threading.Event()

    def _call(self, name, *args):
        hook = self.before.get(name)
        if hook is not None:
            hook(*args)

    # ---- the life of a request

    def begin(self, name, prompt, length, namespace=""):
        prefix = self.pool.match(prompt[:-1], namespace)
        own = self.pool.alloc(-(-len(prompt) // BLOCK) - len(prefix.addrs))
        blocks = np.concatenate([prefix.addrs, own])
        with self.lock:
            one = Request([int(t) for t in prompt], len(prompt) - 1, blocks, own, prefix, len(prompt), length)
            self._write(one.blocks, prefix.tokens, one.tokens[: one.whole])
            self.requests[name] = one

    def _write(self, blocks, first, tokens):
        ids = kvpool.block_ids(blocks)
        for at in range(first, len(tokens)):
            self.kv[ids[at // BLOCK], :, :, :, at % BLOCK] = cell(tokens[at], at)

    def _read(self, blocks, n):
        ids = kvpool.block_ids(blocks)
        for at in range(n):
            found = self.kv[ids[at // BLOCK], :, :, :, at % BLOCK]
            assert (found == found.flat[0]).all(), f"token {at} is half written"
            yield found.flat[0]

    def step(self, name):
        with self.lock:
            one = self.requests.get(name)
            if one is None or one.stopped or len(one.tokens) >= one.length:
                return False
            if one.whole == len(one.blocks) * BLOCK:
                more = np.array([one.spare.pop(0)], np.uint64) if one.spare else self.pool.alloc(1)
                one.blocks, one.own = np.concatenate([one.blocks, more]), np.concatenate([one.own, more])
            self._write(one.blocks, one.whole, one.tokens)
            one.whole += 1
            token = next_token(self._read(one.blocks, one.whole))
            self.reader.put(name, one.term, len(one.tokens) - one.prompt, token, self.name)
            one.tokens.append(token)
            self.changed.notify_all()
            return True

    def run(self, step_s):
        """Decodes all requests, a token each `step_s`, in a thread."""

        def loop():
            while not self._end.wait(step_s):
                for name in list(self.requests):
                    self.step(name)

        self._thread = threading.Thread(target=loop, daemon=True)
        self._thread.start()

    def end(self):
        self._end.set()
        if hasattr(self, "_thread"):
            self._thread.join()

    def finish(self, name):
        """Decodes to the end, and frees everything; the tokens."""
        while self.step(name):
            pass
        with self.lock:
            one = self.requests.pop(name)
            assert len(one.tokens) == one.length
            self._free(one)
            return one.tokens

    def _free(self, one):
        one.prefix.close()
        addrs = np.concatenate([one.own, np.array(one.spare, np.uint64)])
        if len(addrs):
            self.pool.free(addrs)

    # ---- what migrations ask

    def progress(self, request):
        self._call("progress", request)
        with self.lock:
            one = self.requests.get(request)
            if one is None or one.stopped:
                return None
            tokens = np.array(one.tokens, np.int32)
            return migration.RequestProgress(tokens, one.whole, one.blocks, term=one.term)

    def stop(self, request):
        self._call("stop", request)
        with self.lock:
            one = self.requests.get(request)
            if one is None:
                return None
            one.stopped = True
            state = f"{one.prompt} {one.length}".encode()
            return migration.Stopped(np.array(one.tokens, np.int32), one.whole, one.blocks, state)

    def resume(self, request, term):
        with self.lock:
            one = self.requests[request]
            if not one.stopped:
                return
            assert term >= one.term
            one.term, one.stopped = term, False
        self._call("resume", request)

    def release(self, request):
        self._call("release", request)
        with self.lock:
            self._free(self.requests.pop(request))

    def batch(self):
        return len(self.requests)

    def admit(self, request, tokens):
        self._call("admit", request)
        return self.admits

    def prefill(self, request, tokens, begin, blocks):
        self._call("prefill", request)
        self.prefilled.append((begin, len(tokens)))
        self._write(blocks, begin, [int(token) for token in tokens])

    def adopt(self, arrived):
        self._call("adopt", arrived.request)
        prompt, length = map(int, arrived.state.split())
        tokens = arrived.tokens.tolist()
        with self.lock:
            assert arrived.request not in self.requests
            self.requests[arrived.request] = Request(
                tokens, arrived.whole, arrived.blocks, arrived.own, arrived.prefix, prompt, length,
                arrived.term, spare=arrived.spare.tolist(),
            )  # fmt: skip
        self._call("adopted", arrived.request)

    def drop(self, request, term):
        self._call("drop", request)
        with self.lock:
            one = self.requests.get(request)
            if one is not None and one.term == term:
                self._free(self.requests.pop(request))


class Place:
    """A pool with its engine and its migrations."""

    def __init__(self, name, reader, blocks=64, settings=None, **options):
        self.name = name
        self.pool = small_pool(blocks, 0, name=name, **(settings or {}))
        self.address = self.pool.peers.listen(f"unix:@kvpool-migration-{os.getpid()}-{next(_numbers)}")
        self.engine = ToyEngine(self.pool, reader, name)
        timing = migration.Timing(repeat_s=0.05, silence_s=5.0, stop_s=5.0)
        self.migrations = migration.Migrations(self.pool, self.engine, **{"timing": timing} | options)

    def check_empty(self):
        """Soon every block is free but that for messages, and what is cached."""

        def held():
            stats = self.pool.audit().hbm
            return stats.active, stats.reserved, stats.lent, stats.quarantined, stats.pinned

        with contextlib.suppress(AssertionError):
            eventually(lambda: held() == (0, 0, 0, 0, 1))
        assert held() == (0, 0, 0, 0, 1)

    def close(self):
        self.engine.end()
        self.migrations.close()
        self.pool.close()


def eventually(condition, seconds=20.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it does not happen"
        time.sleep(0.002)


def check(reader, engine, name, prompt, length=LENGTH):
    """The tokens are those of a run without migration, at the engine and at the reader."""
    expected = reference(prompt, length)
    assert engine.finish(name) == expected
    assert reader.tokens[name] == expected[len(prompt) :]
