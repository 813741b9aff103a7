"""How long it takes to ask peers for a prompt by its tokens, beside a bare ping-pong of the same sizes.

Each owner is a separate process with one cached prompt. The bare ping-pong is between the same two processes, over a
socket of the same kind, with blocking calls and without frames, checks or a cache: what the message itself costs.
"""

from __future__ import annotations

import contextlib

from bench.context import Context
from bench.measure import Sample, interleave, summarize
from bench.remote import Remote
from bench.result import Report, Row, timed_row
from bench.transfer.match_side import KEYS

TITLE = "Matches at peers by tokens, and fetches of prompts"
PEERS: tuple[str, ...] = ()
OWNERS = 4
BESIDE_US = 30.0  # of one question, beside the message
_SIDE = "bench.transfer.match_side"
_LINKS = ("unix", "tcp", "tcp, trusted")
_TOKENS = (1024, 32_768)


def run(context: Context) -> Report:
    report = Report()
    rounds, repeats = (5, 60) if context.quick else (10, 200)
    for link in _LINKS:
        with report.guarded(link), contextlib.ExitStack() as stack:
            owners = [stack.enter_context(Remote(_SIDE)) for _ in range(OWNERS)]
            asker = stack.enter_context(Remote(_SIDE))
            asker.ask("meet", link=link, owners=[owner.ask("own", link=link) for owner in owners])
            for tokens in _TOKENS:
                _measure(report, asker, link, tokens, rounds, repeats)
            for what, order in (("match_keys", "key_matches"), ("fetch_keys", "key_fetches")):
                times = [taken for _ in range(rounds) for taken in asker.ask(order, repeats=repeats // 10)]
                report.rows.append(timed_row(f"{what} of {KEYS} keys, {link}", {"kvpool": summarize(times)}))
    report.notes += [
        "ping-pong: a message and an answer of the same sizes over a bare socket between the same processes.",
        "each owner has one prompt cached, which is asked for again and again; letting go is not in the time.",
        "by hand: peers.match, fetch and insert, three calls; the prompt is 8 KiB a block.",
    ]
    return report


def _measure(report: Report, asker: Remote, link: str, tokens: int, rounds: int, repeats: int) -> None:
    samples = interleave(
        {
            "kvpool": lambda: asker.ask("matches", tokens=tokens, peers=1, repeats=repeats),
            "ping-pong": lambda: asker.ask("ping_pongs", tokens=tokens, repeats=repeats),
            "four": lambda: asker.ask("matches", tokens=tokens, peers=OWNERS, repeats=repeats),
        },
        rounds,
    )
    four = samples.pop("four")
    what = f"{link}, {tokens // 1024}k tokens"
    report.rows.append(timed_row(f"match, {what}", samples))
    beside = samples["kvpool"].median_us - samples["ping-pong"].median_us
    report.rows.append(Row(f"match beside the message, {what}", beside, target=BESIDE_US))
    report.rows.append(timed_row(f"match at {OWNERS} peers, {what}", {"kvpool": four}))
    fetched: dict[str, Sample] = interleave(
        {
            "kvpool": lambda: asker.ask("fetches", tokens=tokens, repeats=repeats // 10, at_once=True),
            "by hand": lambda: asker.ask("fetches", tokens=tokens, repeats=repeats // 10, at_once=False),
        },
        rounds,
    )
    report.rows.append(timed_row(f"fetch_with_insert, {what}", fetched))
