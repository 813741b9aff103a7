"""One of the two engines of the benches of live migration: it computes or waits, in steps, on one processor.

A step gives each request a token. Prompts are prefilled beside that, so many tokens a step: each costs a product of two
small matrices, or a wait as long, and its keys and values are written.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from statistics import median
from time import monotonic, sleep
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import kvpool
from kvpool.control.migration import Arrived, Migrations, RequestProgress, Stopped
from kvpool.policy.cost import Machine, ModelShape
from kvpool.policy.mell import BoundaryProfile, IterationSample, LinkSample
from kvpool.policy.migration import FIRST, Term, Way, WayCosts

BLOCK_TOKENS, TOKEN_BYTES = 16, 4096
SLOWDOWN = 0.1  # of steps, by what is prefilled beside them
_GROWTH_TOKENS = 2048
_MATRIX, _TOKEN_MATRIX = 256, 128
_TOKEN_S = 0.15e-3  # of one that waits
_AGAIN_TOKENS = 128  # of a request that starts again, a step: it is not background work
_SHAPE: Final = ModelShape(4, 128, 2, 2, 256, 256, 64)  # of keys and values of 4 KiB a token
assert _SHAPE.kv_bytes_per_token == TOKEN_BYTES


@dataclass
class _Request:
    tokens: npt.NDArray[np.int32]
    length: int
    blocks: npt.NDArray[np.uint64]
    own: npt.NDArray[np.uint64]
    term: Term = FIRST
    leaves: bool = False  # at the next border between two steps
    stopped: bool = False
    times: list[float] = field(default_factory=list)  # when each token was there


@dataclass
class _Prefill:
    blocks: npt.NDArray[np.uint64]
    at: int
    end: int
    tokens: int  # a step; 0: as many as all that are background work


class Subject:
    """See bench/remote.py. A loop of steps: each computes, and then gives every request a token."""

    def start(self, name: str, processor: int, blocks: int, step_ms: float, computes: bool) -> float:
        """Makes the pool, and begins to step; returns the time of a step in ms, with nothing beside it.

        `computes`: each step keeps the processor busy; otherwise it waits, as an engine waits for its GPU.
        """
        able = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {able[processor % len(able)]})
        layout = kvpool.RawLayout(block_bytes=TOKEN_BYTES * BLOCK_TOKENS, block_tokens=BLOCK_TOKENS)
        self._pool = kvpool.Pool(layout, hbm_blocks=blocks, name=name, huge_pages="never")
        self._kv = self._pool.tensor(kvpool.HBM).numpy().reshape(blocks, BLOCK_TOKENS, TOKEN_BYTES)
        self._address = self._pool.peers.listen(f"unix:@kvpool-bench-migration-{os.getpid()}")
        self._prefills: list[_Prefill] = []
        self._beside = 16  # tokens
        self._requests: dict[str, _Request] = {}
        self._border = threading.Condition()
        self._matrix = np.random.default_rng(1).random((_MATRIX, _MATRIX), np.float32)
        self._small = self._matrix[:_TOKEN_MATRIX, :_TOKEN_MATRIX].copy()
        self._work, self._wait_s = 1, 0.0
        once_s = median(self._compute() for _ in range(50))
        self._work = max(1, round(step_ms / 1e3 / once_s)) if computes else 0
        self._wait_s = 0.0 if computes else step_ms / 1e3
        self._steps: list[tuple[float, float]] = []  # begin, end
        threading.Thread(target=self._run, daemon=True).start()
        return self._work * once_s * 1e3 or step_ms

    def serve(self, bytes_per_s: float, costs: bool = False) -> None:
        """Requests migrate from and to here from now on. `costs`: they come as those of `profile` say."""
        found = None
        if costs:
            link = self._profile.link("link")
            share = min(1.0, bytes_per_s / link.bytes_per_s)
            found = WayCosts(self._profile, link="link", share=share, slowdown=SLOWDOWN)
            self._beside = max(1, self._profile.tokens_beside(1, SLOWDOWN))
        self._costs = found
        self._migrations = Migrations(self._pool, self, bytes_per_s=bytes_per_s, costs=found)

    def hold(self, blocks: int) -> list[int]:
        """Blocks that a peer may fetch."""
        return [int(addr) for addr in self._pool.alloc(blocks)]

    def give_back(self, blocks: list[int]) -> None:
        self._pool.free(np.array(blocks, np.uint64))

    def profile(self, peer: str, blocks: list[int], sizes: list[int], tokens: list[int], rounds: int) -> dict[str, Any]:
        """Measures the link from a peer, by fetches of some of its blocks, and steps with a prompt beside them."""
        own = self._pool.alloc(len(blocks))
        links = []
        for size in sizes:
            taken = []
            for _ in range(rounds):
                begin = monotonic()
                self._pool.fetch(peer, blocks[:size], to=own[:size], priority="background", timeout=60).wait()
                taken.append(monotonic() - begin)
            links.append(LinkSample(size * BLOCK_TOKENS * TOKEN_BYTES, median(taken)))
        steps = tuple(IterationSample(1, beside, self._step_s(own, beside, 4 * rounds)) for beside in (0, *tokens))
        self._pool.free(own)
        self._profile = BoundaryProfile(_SHAPE, Machine("bench", "numpy", 1), BLOCK_TOKENS, {"link": links}, steps)
        return self._profile.as_json()

    def _step_s(self, own: npt.NDArray[np.uint64], beside: int, steps: int) -> float:
        since = monotonic()
        if beside:
            for _ in range(steps):
                self._prefill(own, 0, beside, beside)
        else:
            with self._border:
                count = len(self._steps) + steps
                self._border.wait_for(lambda: len(self._steps) >= count, 60)
        return median(self.steps_ms(since, monotonic())) / 1e3

    def choose(self, peer: str, tokens: int) -> dict[str, float]:
        """What the costs predict for each way, in seconds."""
        assert self._costs is not None
        choice = self._costs.choose(peer, tokens, 1)
        return {"kv": choice.kv_s, "tokens": choice.tokens_s}

    def listen(self) -> str:
        return self._address

    def connect(self, address: str) -> str:
        return self._pool.peers.connect(address)

    def _compute(self, tokens: int = 0) -> float:
        begin = monotonic()
        for _ in range(self._work):
            self._matrix @ self._matrix
        if self._wait_s:
            sleep(self._wait_s + tokens * _TOKEN_S)
        else:
            for _ in range(tokens):
                self._small @ self._small
        return monotonic() - begin

    def _run(self) -> None:
        while True:
            begin = monotonic()
            with self._border:
                here = [one for one in self._requests.values() if not one.stopped]
                job = self._prefills[0] if self._prefills else None
                until = 0 if job is None else min(job.end, job.at + (job.tokens or self._beside))
            self._compute(0 if job is None else until - job.at)
            with self._border:
                if job is not None:
                    self._write(job, until)
                for one in here:
                    self._give_token(one)
                self._steps.append((begin, monotonic()))
                for one in here:
                    one.stopped = one.stopped or one.leaves
                self._border.notify_all()

    def _write(self, job: _Prefill, until: int) -> None:
        ids = kvpool.block_ids(job.blocks[: -(-until // BLOCK_TOKENS)])
        for at in range(job.at, until):
            self._kv[ids[at // BLOCK_TOKENS], at % BLOCK_TOKENS] = 1
        job.at = until
        if job.at == job.end:
            self._prefills.remove(job)

    def _prefill(self, blocks: npt.NDArray[np.uint64], begin: int, end: int, tokens: int = 0) -> None:
        job = _Prefill(blocks, begin, end, tokens)
        with self._border:
            self._prefills.append(job)
            self._border.wait_for(lambda: job.at == job.end, 600)

    def _give_token(self, one: _Request) -> None:
        if one.length == len(one.tokens):  # one that stays for the whole bench
            one.length -= BLOCK_TOKENS
        at = one.length - 1
        block = kvpool.block_ids(one.blocks[at // BLOCK_TOKENS : at // BLOCK_TOKENS + 1])[0]
        self._kv[block, at % BLOCK_TOKENS] = 1
        one.tokens[one.length] = at
        one.length += 1
        one.times.append(monotonic())

    # ---- what the bench asks

    def begin(self, request: str, context: int) -> None:
        """A request of so many tokens decodes from now on."""
        room = context + _GROWTH_TOKENS
        blocks = self._pool.alloc(-(-room // BLOCK_TOKENS))
        tokens = np.zeros(blocks.size * BLOCK_TOKENS, np.int32)
        with self._border:
            self._requests[request] = _Request(tokens, context, blocks, blocks)

    def await_tokens(self, request: str, tokens: int) -> list[float]:
        """Waits for so many tokens that were put out here; their times."""
        with self._border:
            self._border.wait_for(lambda: len(self._requests[request].times) >= tokens, 60)
            return self._requests[request].times[:tokens]

    def migrate(self, request: str, to: str, by: Way = "kv") -> dict[str, Any]:
        """Live. When its last token was put out here, and what the handle says."""
        one = self._requests[request]
        begin = monotonic()
        moved = self._migrations.migrate(request, to, by=by, timeout=120).wait()
        return {
            "last": one.times[-1], "stop_s": moved.stop_s, "rounds": moved.rounds, "blocks": moved.blocks_sent,
            "way": moved.way, "total_s": moved.total_s, "begin": begin, "end": monotonic(),
        }  # fmt: skip

    def halt(self, request: str) -> dict[str, Any]:
        """Stop and copy: stops it. Its last token's time, its length, and its blocks."""
        stopped = self.stop(request)
        assert stopped is not None
        one = self._requests[request]
        return {"last": one.times[-1], "length": one.length, "blocks": [int(addr) for addr in stopped.blocks]}

    def copy(self, request: str, peer: str, length: int, blocks: list[int]) -> float:
        """Fetches all blocks of a request that was stopped, and decodes it; when its first token was there."""
        own = self._pool.alloc(len(blocks) + _GROWTH_TOKENS // BLOCK_TOKENS)
        self._pool.fetch(peer, blocks, to=own[: len(blocks)], priority="decode", timeout=60).wait()
        tokens = np.zeros(own.size * BLOCK_TOKENS, np.int32)
        with self._border:
            self._requests[request] = _Request(tokens, length, own, own)
        return self.await_tokens(request, 1)[0]

    def again(self, request: str, length: int) -> float:
        """Starts a request again that was stopped elsewhere, from its tokens; when its next token was there."""
        own = self._pool.alloc(-(-(length + _GROWTH_TOKENS) // BLOCK_TOKENS))
        self._prefill(own, 0, length - 1, _AGAIN_TOKENS)
        tokens = np.zeros(own.size * BLOCK_TOKENS, np.int32)
        with self._border:
            self._requests[request] = _Request(tokens, length, own, own)
        return self.await_tokens(request, 1)[0]

    def end(self, request: str) -> None:
        """The request is over, if it is here."""
        with self._border:
            one = self._requests.pop(request, None)
        if one is not None:
            self._pool.free(one.own)

    def steps_ms(self, begin: float, end: float) -> list[float]:
        """The times of the steps that were under way between the two."""
        with self._border:
            return [1e3 * (until - since) for since, until in self._steps if begin <= until and since <= end]

    def now(self) -> float:
        return monotonic()

    # ---- kvpool.control.migration.MigratingEngine

    def progress(self, request: str) -> RequestProgress | None:
        with self._border:
            one = self._requests.get(request)
            if one is None:
                return None
            room = len(one.blocks) * BLOCK_TOKENS
            return RequestProgress(one.tokens[: one.length].copy(), one.length - 1, one.blocks, "", one.term, room)

    def stop(self, request: str) -> Stopped | None:
        with self._border:
            one = self._requests[request]
            one.leaves = True
            self._border.wait_for(lambda: one.stopped, 60)
            used = -(-(one.length - 1) // BLOCK_TOKENS)
            return Stopped(one.tokens[: one.length].copy(), one.length - 1, one.blocks[:used])

    def resume(self, request: str, term: Term) -> None:
        with self._border:
            one = self._requests[request]
            one.leaves = one.stopped = False
            one.term = term

    def release(self, request: str) -> None:
        self.end(request)

    def batch(self) -> int:
        return len(self._requests)

    def admit(self, request: str, tokens: int) -> bool:
        return True

    def prefill(self, request: str, tokens: npt.NDArray[np.int32], begin: int, blocks: npt.NDArray[np.uint64]) -> None:
        self._prefill(blocks, begin, len(tokens))

    def adopt(self, arrived: Arrived) -> None:
        own = np.concatenate([arrived.own, arrived.spare])
        arrived.prefix.close()  # nothing is cached here
        tokens = np.zeros(own.size * BLOCK_TOKENS, np.int32)
        tokens[: len(arrived.tokens)] = arrived.tokens
        with self._border:
            self._requests[arrived.request] = _Request(tokens, len(arrived.tokens), own, own, arrived.term)

    def drop(self, request: str, term: Term) -> None:
        self.end(request)
