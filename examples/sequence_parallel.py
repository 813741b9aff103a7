"""Long prompts, each computed by several processes in turn: one computes the first part, the next one the second, ...

    python examples/sequence_parallel.py [--parts N] [--prompts N] [--json]

A token's K and V depend on those of all tokens before it. So a process that computes the second part of a prompt needs
the K and V of the first, and gets them from the process that has computed it: `transfer_with_insert` there, `received`
here. For its engine they are a cached prefix like any other: nothing in it knows of parts. The last process has all,
and generates.

    process 0   | prompt 0, part 0 | prompt 1, part 0 | prompt 2, part 0 |
    process 1                      | prompt 0, part 1 | prompt 1, part 1 | prompt 2, part 1 |
    process 2                                         | prompt 0, part 2 | prompt 1, part 2 | ...

One prompt alone is not done sooner: each part waits for the one before it. Several overlap as drawn, as far as the
machine has processors for it. The last process holds the K and V of the whole prompt: where no pool has room for it,
see long_context, in which each process keeps its own part. Exits with 1 when a token differs from what a single process
generates.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import secrets
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from instance import Reply, Server, Tokens
from process import Instance

if TYPE_CHECKING:
    from rich.console import Console

_NEW_TOKENS = 12
_START_S = 60.0
_WAIT_S = 30.0


@dataclass
class Work:
    """What one process did for all prompts."""

    computed_tokens: int = 0
    busy_s: float = 0.0  # computing
    sent_bytes: int = 0
    sending_s: float = 0.0


class Part(Server):
    """An instance that computes one part of each prompt: a server with a predecessor and a successor."""

    part = 0
    parts = 1
    successor = ""

    def take_place(self, part: int, parts: int, successor: str | None) -> None:
        """Of `parts` processes this is number `part`; the next one listens at the address `successor`."""
        self.part, self.parts = part, parts
        if successor:
            self.successor = self.connect(successor, _WAIT_S)

    def begin(self, prompts: list[Tokens]) -> Work:
        """What the first one does."""
        work = Work()
        for prompt in prompts:
            self._compute_and_send(prompt, work)
        return work

    def go_on(self, count: int) -> Work:
        """What those in the middle do."""
        work = Work()
        for _ in range(count):
            with self._next_prompt() as prompt:
                self._compute_and_send(prompt, work)
        return work

    def generate(self, count: int, new_tokens: int) -> tuple[Work, list[Reply]]:
        """What the last one does."""
        work, replies = Work(), []
        for _ in range(count):
            with self._next_prompt() as prompt:
                replies.append(self._compute(prompt, new_tokens, work))
        return work, replies

    @contextlib.contextmanager
    def _next_prompt(self) -> Iterator[Tokens]:
        """What the predecessor sends. The K and V of the parts before this one stay cached while it is open."""
        item = self.pool.inbox.receive(timeout=_WAIT_S)
        if item is None:
            raise TimeoutError(f"nothing came from part {self.part - 1} within {_WAIT_S} s")
        with item:
            yield np.frombuffer(item.private, np.int32)

    def _compute_and_send(self, prompt: Tokens, work: Work) -> None:
        """Computes this part, behind the ones that it finds cached, and sends all of them on."""
        size = self.pool.kv_layout.block_tokens
        blocks = -(-len(prompt) // size)
        so_far = prompt[: blocks * (self.part + 1) // self.parts * size]
        self._compute(so_far, 1, work)
        with self.pool.match(so_far) as hit:
            sent = self.pool.transfer_with_insert(self.successor, so_far, hit.addrs, private=prompt.tobytes()).wait()
        work.sent_bytes += sent.stats.bytes
        work.sending_s += sent.stats.total_us / 1e6

    def _compute(self, prompt: Tokens, new_tokens: int, work: Work) -> Reply:
        reply = self.serve(prompt, new_tokens)
        work.computed_tokens += reply.prompt_tokens - reply.cached_tokens
        work.busy_s += reply.total_s
        return reply


@dataclass(frozen=True)
class Result:
    """All prompts, computed by several processes and by one."""

    works: list[Work]  # of the processes, in the order of their parts
    together: list[Reply]
    together_s: float
    alone: list[Reply]
    alone_s: float

    @property
    def same_tokens(self) -> bool:
        return [reply.tokens for reply in self.together] == [reply.tokens for reply in self.alone]


def compute(parts: int, prompts: list[Tokens], settings: dict[str, Any]) -> Result:
    """Starts the processes, has the prompts computed by all of them and then by one, and ends them."""
    with contextlib.ExitStack() as running:
        instances = [Instance(f"part-{number}", Part, **settings) for number in range(parts)]
        for instance in instances:
            running.callback(instance.close)
        for instance in instances:
            instance.answer(_START_S)
        successor = None
        for number in reversed(range(parts)):  # who is to be connected to listens already
            address = instances[number].ask("listen", "tcp:127.0.0.1:0")
            instances[number].ask("take_place", number, parts, successor)
            successor = address

        started = time.perf_counter()
        first, *middle, last = instances
        last.order("generate", len(prompts), _NEW_TOKENS)
        for instance in middle:
            instance.order("go_on", len(prompts))
        first.order("begin", prompts)
        works = [instance.answer(_WAIT_S) for instance in (first, *middle)]
        work, together = last.answer(_WAIT_S)
        together_s = time.perf_counter() - started

        started = time.perf_counter()
        alone = [first.ask("serve_without_cache", prompt, _NEW_TOKENS) for prompt in prompts]
        return Result([*works, work], together, together_s, alone, time.perf_counter() - started)


def show(console: Console, result: Result) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, header_style="bold")
    for name in ("process", "computes", "in", "sends", "in"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, work in enumerate(result.works):
        sends = (f"{work.sent_bytes / (1 << 20):.1f} MiB", f"{1000 * work.sending_s:.1f} ms")
        table.add_row(
            f"part {number}",
            f"{work.computed_tokens:,} tokens",
            f"{work.busy_s:.2f} s",
            *(sends if number < len(result.works) - 1 else ("-", "-")),
        )
    console.print(table)
    count = len(result.alone)
    console.print(
        f"  {count} prompts of {sum(reply.prompt_tokens for reply in result.alone):,} tokens: "
        f"[green]{result.together_s:.2f} s[/green] together, {result.alone_s:.2f} s by one process"
    )
    if result.same_tokens:
        console.print(f"  [green]✓[/green] the same tokens in all {count}\n")
    else:
        console.print("  [bold red]✗ other tokens: this must not be[/bold red]\n")


def long_prompts(count: int) -> list[Tokens]:
    from prompts import Conversation, load_corpus

    corpus = load_corpus()
    return [Conversation(agent, corpus.questions[0]).prompt() for agent in corpus.agents[:count]]


def main() -> int:
    arguments = _arguments()
    missing = [name for name in ("torch", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"This needs {' and '.join(missing)}: pip install '.[demo]' torch", file=sys.stderr)
        return 2
    from rich.console import Console

    console = Console(quiet=arguments.json, highlight=False)
    settings = {"secret": secrets.token_hex(32)}
    with console.status(f"{arguments.parts} processes start and compute"):
        result = compute(arguments.parts, long_prompts(arguments.prompts), settings)
    if arguments.json:
        figures = {"same_tokens": result.same_tokens, **asdict(result)}
        print(json.dumps(figures, indent=2))
    show(console, result)
    return 0 if result.same_tokens else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compute long prompts by several processes in turn.")
    parser.add_argument("--parts", type=int, choices=range(2, 9), default=2, help="processes, 2 to 8 (default 2)")
    parser.add_argument("--prompts", type=int, choices=range(1, 5), default=4, help="prompts, 1 to 4 (default 4)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
