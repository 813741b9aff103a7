"""The second half of the demo: two instances in two processes, and what happens when one of them is killed.

    python examples/two_instances.py [--requests N] [--seed N] [--tcp] [--route NAME] [--json]

Instance A computes prompts and sends their blocks to instance B, which serves the same prompts without computing them
again. Then A is killed in the middle of a transfer, and comes back; then B is. Exits with 1 when anything was not as
promised. The instances are in instance.py, and instances of yours would do the same.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import secrets
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from instance import Delivery, Reply, Tokens
    from process import Instance
    from rich.console import Console

    import kvpool

_NEW_TOKENS = 12
_LAYERS_BEFORE_THE_END = 2  # of four: then the sender, or the receiver, is killed
_START_S = 60.0  # until a process must be up
_WAIT_S = 10.0  # for anything else
# Promised are 100 ms after a connection is reset. A machine that is busy with other things gets far more than that.
_NOTICED_S_MAX = 10.0
_RELEASED_S_MAX = 5.0  # until blocks that were kept for a dead process are free


@dataclass(frozen=True)
class Request:
    """A prompt that was served twice: by A, which sent its blocks on, and by B."""

    number: int
    computed: Reply
    sent: kvpool.TransferStats
    delivered: Delivery

    @property
    def there(self) -> Reply:
        return self.delivered.reply

    @property
    def as_promised(self) -> bool:
        """The same tokens; and of the prompt B computes what fills no whole block, and the last token."""
        block_tokens = self.delivered.tokens // self.delivered.blocks
        computed = self.there.prompt_tokens - self.there.cached_tokens
        return self.there.tokens == self.computed.tokens and 1 <= computed <= block_tokens


@dataclass
class Story:
    """What has happened, and whether it was as promised."""

    console: Console
    requests: list[Request] = field(default_factory=list)
    noticed_ms: dict[str, float] = field(default_factory=dict)
    promises: dict[str, bool] = field(default_factory=dict)

    def promise(self, text: str, kept: bool, note: str = "") -> None:
        """Something that must be so."""
        self.promises[text] = kept and self.promises.get(text, True)
        self.console.print(f"  {_mark(kept)} {text}" + (f" [dim]({note})[/dim]" if note else ""))

    def noticed(self, who: str, what: str, seconds: float) -> None:
        self.noticed_ms[who] = 1000 * seconds
        self.promise(f"{who} notices that {what}", seconds < _NOTICED_S_MAX, f"after {1000 * seconds:.1f} ms")


def main() -> int:
    arguments = _arguments()
    started = time.monotonic()
    missing = [name for name in ("torch", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        hint = "`make demo` installs all it needs; by hand: pip install '.[demo]' torch"
        print(f"The demo needs {' and '.join(missing)}. {hint}", file=sys.stderr)
        return 2
    from rich.console import Console

    console = Console(quiet=arguments.json, highlight=False)
    story = Story(console)
    console.print("\n[bold]kvpool demo, two processes[/bold]: what one instance computed, the other need not\n")
    with contextlib.ExitStack() as running:
        tell_story(story, arguments, running)
    kept = all(story.promises.values())
    if arguments.json:
        print(json.dumps(as_json(story), indent=2))
    console.print(
        f"\n[dim]{time.monotonic() - started:.0f} s.[/dim] "
        + ("[bold green]All as promised.[/bold green]" if kept else "[bold red]Not as promised.[/bold red]")
        + " Next:\n"
        "  examples/instance.py            what an instance does with its peers\n"
        "  examples/sequence_parallel.py   long prompts, computed by several processes\n"
        "  docs/how-to/transfer.md         all verbs, routes, and what can go wrong\n"
    )
    return 0 if kept else 1


def tell_story(story: Story, arguments: argparse.Namespace, running: contextlib.ExitStack) -> None:
    from instance import Server
    from process import Instance

    # The secret is made for this run: processes that do not know it cannot connect.
    settings: dict[str, Any] = {"secret": secrets.token_hex(32)}
    if arguments.route:
        settings["routes"] = (arguments.route,)  # else the cheapest of those that work
    if arguments.tcp:
        settings["prefer_unix_socket"] = False  # by default, processes of one host use a Unix socket
    address = "tcp:127.0.0.1:0" if arguments.tcp else f"unix:@kvpool-demo-{os.getpid()}"

    def start(name: str) -> Instance:
        instance = Instance(name, Server, **settings)
        running.callback(instance.close)
        return instance

    *prompts, lost, last = _prompts(arguments.requests, arguments.seed)
    with story.console.status("starting two processes, each with PyTorch and a model"):
        a, b = start("A"), start("B")
        for instance in (a, b):
            instance.answer(_START_S)
        address = a.ask("listen", address)
        b.ask("connect", address, _WAIT_S)
    _show_meeting(story, b, address)

    with story.console.status("serving"):
        for number, prompt in enumerate(prompts):
            story.requests.append(_serve_here_and_there(a, b, number, prompt))
    _show_requests(story)
    known, before = prompts[0], story.requests[0].computed

    story.console.print("\n[bold]kill -9 A[/bold], which is in the middle of a transfer")
    a.ask("serve", lost, _NEW_TOKENS)
    new_a = start("A")  # takes a second or two; it will listen when the old one is dead
    killed_at = _kill_the_sender(story, a, b, lost)
    _serves_on(story, b, killed_at, known, before)

    story.console.print("\n[bold]A comes back[/bold]: a new process, with an empty cache and the old name")
    new_a.answer(_START_S)
    b.ask("connect", new_a.ask("listen", address), _WAIT_S)
    again = _serve_here_and_there(new_a, b, len(prompts), lost)
    story.promise("A sends again what was cut off; B serves it", again.as_promised, _from_cache(again.there))
    given = _give_back(b, new_a, known)
    story.promise("B sends A the cache that it had lost", given.tokens == before.tokens, _from_cache(given))

    story.console.print("\n[bold]kill -9 B[/bold], to which A is sending")
    new_a.ask("serve", last, _NEW_TOKENS)
    killed_at = _kill_the_receiver(story, new_a, b, last)
    _serves_on(story, new_a, killed_at, known, before)


# ---- the parts of it


def _serve_here_and_there(a: Instance, b: Instance, number: int, prompt: Tokens) -> Request:
    """A computes a prompt and sends its blocks; B, which waits for them, serves it."""
    computed = a.ask("serve", prompt, _NEW_TOKENS)
    b.order("serve_received", _NEW_TOKENS, _WAIT_S)  # from now on: how long A computes is no matter of the sending
    sent = a.ask("send", b.name, number, prompt)
    return Request(number, computed, sent, b.answer())


def _give_back(b: Instance, a: Instance, prompt: Tokens) -> Reply:
    """The same in the other direction, over the same connection."""
    b.ask("send", a.name, 0, prompt)
    delivery: Delivery = a.ask("serve_received", _NEW_TOKENS, _WAIT_S)
    return delivery.reply


def _kill_the_sender(story: Story, a: Instance, b: Instance, prompt: Tokens) -> float:
    cached = b.ask("cached_tokens", prompt)
    written, total = a.ask("begin_sending", b.name, prompt, _LAYERS_BEFORE_THE_END, _WAIT_S)
    held = b.ask("blocks").for_peers
    story.promise(f"B has reserved {held} blocks, and {_size(written)} of {_size(total)} are there", held > 0)
    b.order("peer_is_lost", a.name, _WAIT_S)
    killed_at = a.kill()
    story.noticed("B", "A is gone", b.answer() - killed_at)
    error = b.ask("sending_fails_at_once", a.name)
    story.promise("a transfer to A fails with PeerLost", error == "PeerLost")
    story.promise("what had come of the prompt is not in B's cache", b.ask("cached_tokens", prompt) == cached)
    return killed_at


def _kill_the_receiver(story: Story, a: Instance, b: Instance, prompt: Tokens) -> float:
    a.ask("begin_sending", b.name, prompt, _LAYERS_BEFORE_THE_END, _WAIT_S)
    a.order("sending_fails", _WAIT_S)
    killed_at = b.kill()
    error, at = a.answer()
    story.noticed("A", "B is gone", at - killed_at)
    story.promise("its transfer fails with PeerLost", error == "PeerLost")
    return killed_at


def _serves_on(story: Story, survivor: Instance, killed_at: float, prompt: Tokens, before: Reply) -> None:
    """The one who is left has everything that was its own, and nothing that was the other's."""
    blocks, at = survivor.ask("blocks_come_back", _WAIT_S)
    story.promise(
        f"{survivor.name} has no block reserved, lent or lost",
        (blocks.active, blocks.for_peers) == (0, 0) and at - killed_at < _RELEASED_S_MAX,
        f"after {1000 * (at - killed_at):.0f} ms; {blocks.cached} cached, the rest free",
    )
    reply: Reply = survivor.ask("serve", prompt, _NEW_TOKENS)
    same = reply.tokens == before.tokens and reply.cached_tokens > 0
    story.promise(f"{survivor.name} serves on, and says the same as before", same, _from_cache(reply))


def _prompts(count: int, seed: int) -> list[Tokens]:
    """Two questions to each agent, so that every second prompt begins like the one before it; then two of others."""
    from prompts import Conversation, load_corpus

    corpus = load_corpus()
    agents = [*(corpus.agents[number // 2] for number in range(count)), *corpus.agents[-2:]]
    questions = [corpus.questions[(seed + number) % len(corpus.questions)] for number in range(len(agents))]
    return [Conversation(*asked).prompt() for asked in zip(agents, questions, strict=True)]


# ---- what is shown


def _show_meeting(story: Story, b: Instance, address: str) -> None:
    (a,) = b.ask("peers")
    story.console.print(
        f"  [dim]A[/dim]  process {a.pid}, listens at {address}\n"
        f"  [dim]B[/dim]  process {b.pid}, has connected: {a.link}; routes for blocks: {', '.join(a.routes)}\n"
        "  Both have proved that they know a secret, which was made for this run.\n"
    )


def _show_requests(story: Story) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, header_style="bold")
    for name in ("prompt", "A computes", "TTFT", "A sends", "bytes", "in", "B finds", "TTFT", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for request in story.requests:
        here, sent, there = request.computed, request.sent, request.there
        table.add_row(
            f"{here.prompt_tokens:,}",
            f"{here.prompt_tokens - here.cached_tokens:,}",
            f"{1000 * here.ttft_s:.0f} ms",
            f"{sent.blocks - sent.skipped_blocks} of {sent.blocks}",
            _size(sent.bytes),
            f"{sent.total_us / 1000:.1f} ms",
            f"[green]{there.cached_tokens:,}[/green]",
            f"[green]{1000 * there.ttft_s:.0f} ms[/green]",
            _mark(here.tokens == there.tokens),
        )
    story.console.print(table)
    same = sum(request.computed.tokens == request.there.tokens for request in story.requests)
    kept = sum(request.as_promised for request in story.requests)
    count = len(story.requests)
    story.promise("B generates the tokens that A generated", same == count, f"{same} of {count} prompts")
    story.promise("B computes only what fills no whole block", kept == count, f"{kept} of {count} prompts")
    skipped = sum(request.sent.skipped_blocks for request in story.requests)
    blocks = sum(request.sent.blocks for request in story.requests)
    routes = sorted({request.sent.route for request in story.requests})
    story.promise("what B has is not sent", skipped > 0, f"{skipped} of {blocks} blocks; the others by {routes[-1]}")


def _mark(good: bool) -> str:
    return "[green]✓[/green]" if good else "[bold red]✗[/bold red]"


def _from_cache(reply: Reply) -> str:
    return f"{reply.cached_tokens:,} of {reply.prompt_tokens:,} tokens cached"


def _size(number: int) -> str:
    return f"{number / (1 << 20):.1f} MiB" if number >= 1 << 20 else f"{number / (1 << 10):.0f} KiB"


def as_json(story: Story) -> dict[str, Any]:
    """All figures, for programs."""
    return {
        "requests": [
            {
                "number": request.number,
                "prompt_tokens": request.computed.prompt_tokens,
                "computed_tokens": request.computed.prompt_tokens - request.computed.cached_tokens,
                "cached_tokens_there": request.there.cached_tokens,
                "ttft_s": [request.computed.ttft_s, request.there.ttft_s],
                "same_tokens": request.computed.tokens == request.there.tokens,
                "transfer": dataclasses.asdict(request.sent),
            }
            for request in story.requests
        ],
        "noticed_ms": story.noticed_ms,
        "promises": story.promises,
    }


def _arguments() -> argparse.Namespace:
    def count(text: str) -> int:
        number = int(text)
        if not 2 <= number <= 4:
            raise argparse.ArgumentTypeError(f"{number} is not 2, 3 or 4")
        return number

    parser = argparse.ArgumentParser(description="One instance computes and sends, another one serves; kill either.")
    parser.add_argument("--requests", type=count, default=4, help="how many prompts to send first (default 4)")
    parser.add_argument("--seed", type=int, default=0, help="which questions (default 0)")
    parser.add_argument("--tcp", action="store_true", help="meet over TCP, as two hosts do (default: a Unix socket)")
    parser.add_argument("--route", choices=("shm", "cma", "sock", "ucx"), help="send blocks by this route only")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
