"""The demo, line by line: one process with the cache off and on, then a second one that is sent what the first has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from kvpool.cli.demo.answering import LAYOUT, OWN, SHAPE, SHARED, Answer, Engine, make_pool, prompts, times_sooner
from kvpool.cli.demo.blas_threads import one_blas_thread
from kvpool.errors import StateError
from kvpool.pool import Pool

__all__ = ["run"]

_WAIT_S = 60.0
_module = "kvpool.cli.demo.second"


def run(say: Callable[[str], None], questions: int = 6) -> None:
    """Tells the story; takes some seconds.

    Args:
        say: Gets each line.
        questions: How many prompts are answered.

    Raises:
        StateError: An answer with the cache differs from the one without, or the second process fails.
        OutOfMemory: There are not some 50 MiB.
    """
    asked = prompts(questions + 1)
    say(f"A transformer in NumPy ({SHAPE.layers} layers, {SHAPE.heads} heads) answers {questions} prompts:")
    say(f"{SHARED} tokens that all share, and {OWN} more of each. A block holds {LAYOUT.block_tokens} tokens.")
    say("")
    say("prompt   cache off       cache on                   to the first token")
    with one_blas_thread(), make_pool("off") as plain, make_pool("first") as cached:
        off, on = Engine(plain, caches=False), Engine(cached, caches=True)
        off.warm()
        on.warm()
        answers = [_compare(say, number, off, on, asked[number]) for number in range(questions)]
        later = answers[1:] or answers
        faster = median(without.first_s / with_.first_s for without, with_ in later)
        say("")
        say(f"The answers are the same, and from the second prompt on the first token comes {times_sooner(faster)}.")
        say(f"{cached}")
        say("")
        _tell_second(say, cached, asked[0][:SHARED], questions, off.answer(asked[questions]))


def _compare(say: Callable[[str], None], number: int, off: Engine, on: Engine, prompt: Any) -> tuple[Answer, Answer]:
    without, with_ = off.answer(prompt), on.answer(prompt)
    if without.tokens != with_.tokens:
        raise StateError(f"prompt {number + 1}: the answer with the cache differs from the one without")
    say(
        f"{number + 1:>6}   {without.first_s * 1000:6.0f} ms   {with_.cached:>4} of {len(prompt)} tokens"
        f"   {with_.first_s * 1000:6.0f} ms"
    )
    return without, with_


def _tell_second(say: Callable[[str], None], pool: Pool, shared: Any, question: int, expected: Answer) -> None:
    """A second process gets the shared beginning from the first one, and answers a question that is new."""
    address = pool.peers.listen(f"unix:@kvpool-demo-{os.getpid()}")
    say("A second process starts, connects to this one, and is sent the beginning that all prompts share.")
    with _second(address, question) as process:
        peer = _peer(pool, process)
        with pool.match(shared) as hit:
            sent = pool.transfer_with_insert(peer, shared, hit.addrs, private=b"shared", timeout=_WAIT_S).wait(_WAIT_S)
        stats = sent.stats
        said = json.loads(_finished(process))
    if tuple(said["tokens"]) != expected.tokens:
        raise StateError("the second process answers otherwise than the first")
    say(f"sent {stats.bytes / 2**20:.1f} MiB by the route {stats.route}")
    say(f"Of each new question {said['cached']} tokens were cached there, and the answers are the same.")
    on, off = said["on_s"], said["off_s"]
    say(f"There the first token comes after {on * 1000:.0f} ms, without the cache after {off * 1000:.0f} ms (medians):")
    say(f"{times_sooner(off / on)}.")


@contextmanager
def _second(address: str, question: int) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", _module, address, str(question)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _peer(pool: Pool, process: subprocess.Popen[str]) -> str:
    """The name of the second process's pool, when it has connected."""
    until = time.monotonic() + _WAIT_S
    while time.monotonic() < until and process.poll() is None:
        if found := pool.peers.list():
            return found[0].name
        time.sleep(0.01)
    raise StateError(f"the second process has not connected: {_finished(process)}")


def _finished(process: subprocess.Popen[str]) -> str:
    try:
        out, errors = process.communicate(timeout=_WAIT_S)
    except subprocess.TimeoutExpired:
        raise StateError(f"the second process has not ended within {_WAIT_S:.0f} s") from None
    if process.returncode != 0:
        raise StateError(f"the second process ended with {process.returncode}: {_last_line(errors)}")
    return out


def _last_line(errors: str) -> str:
    return (errors.strip().splitlines() or ["it said nothing"])[-1]
